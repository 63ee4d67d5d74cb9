"""A step that computes one mean loss per sample in a loop trains the weights of one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import DataParallelStrategy, ZeroStrategy
from tests.curves import compare_weights
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, made
from tests.trainers import trainer


class Loops(LightningModule):
    """The mean over samples of the mean over each sample's targets, of which samples have 1 to 6."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(5, 4)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        samples, targets = batch
        losses = [F.cross_entropy(self.net(x), y) for x, y in zip(samples, targets, strict=True)]
        loss = torch.stack(losses).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def trained(strategy: MakeStrategy | None, readers: int) -> tuple[dict[str, Tensor], float]:
    random = torch.Generator().manual_seed(1)
    targets = torch.randint(4, (22, 6), generator=random)
    for sample, row in enumerate(targets):
        row[1 + sample % 6 :] = -100
    data = TensorDataset(torch.randn(22, 6, 5, generator=random), targets)  # the last of three batches is smaller
    model, fitter = Loops(), trainer(made(strategy), max_epochs=1)
    fitter.fit(model, DataLoader(data, batch_size=8 // readers))
    return {**model.state_dict()}, float(fitter.callback_metrics["loss_epoch"])


@pytest.mark.parametrize("strategy", [DataParallelStrategy, partial(ZeroStrategy, stage=2)], ids=["dp", "zero2"])
def test_losses_in_a_loop_over_samples_count_by_samples(strategy: MakeStrategy) -> None:
    expected = begun_on_one(trained, None, 1)
    found = run_on_ranks(2, trained, strategy, 2)
    weights, loss = expected.result()
    for theirs, logged in found:
        compare_weights(weights, theirs, rtol=1e-5)
        assert logged == pytest.approx(loss, rel=1e-5)
