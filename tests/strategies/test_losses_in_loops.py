"""Steps whose number of mean losses depends on their samples train the weights of one device."""

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
from tests.heard import heard
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
        losses = [F.cross_entropy(self.net(x), y) for x, y, _ in zip(*batch, strict=True)]
        self.log("loss", loss := torch.stack(losses).mean(), on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class OfSources(Loops):
    """Beside its loss, it computes the loss of some samples, which some batches lack: that may differ between ranks."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x, target, task = batch
        logits, source = self.net(x).flatten(0, 1), (task == 0).repeat_interleave(6)
        with torch.no_grad():
            target = target.flatten()
            self.log("source", F.cross_entropy(logits[source], target[source]) if source.any() else 0.0)
        self.log("loss", loss := F.cross_entropy(logits, target), on_step=True, on_epoch=True)
        return loss


def trained(kind: type[Loops], strategy: MakeStrategy | None, ranks: int) -> tuple[dict[str, Tensor], float, list[str]]:
    random = torch.Generator().manual_seed(1)
    targets = torch.randint(4, (22, 6), generator=random)
    for sample, row in enumerate(targets):
        row[1 + sample % 6 :] = -100
    tasks = torch.tensor(([0, 0, 1, 1, 1, 2, 2, 2] * 3)[:22])  # rank 0 has others than rank 1
    # the last of three batches is smaller
    data = TensorDataset(torch.randn(22, 6, 5, generator=random).double(), targets, tasks)
    model, fitter = kind(), trainer(made(strategy), max_epochs=1, precision="64-true")
    with heard() as lines:
        fitter.fit(model, DataLoader(data, batch_size=8 // ranks))
    warned = [line for line in lines if "losses" in line]
    return {**model.state_dict()}, float(fitter.callback_metrics["loss_epoch"]), warned


@pytest.mark.parametrize("strategy", [DataParallelStrategy, partial(ZeroStrategy, stage=2)], ids=["dp", "zero2"])
@pytest.mark.parametrize("kind", [Loops, OfSources])
def test_weights_are_those_of_one_device(kind: type[Loops], strategy: MakeStrategy) -> None:
    expected = begun_on_one(trained, kind, None, 1)
    for weights, loss, warned in run_on_ranks(2, trained, kind, strategy, 2):
        torch.testing.assert_close(weights, expected.result()[0], rtol=1e-9, atol=1e-9)
        assert loss == pytest.approx(expected.result()[1], rel=1e-9)
        assert kind is Loops or warned == []
