"""Means that ranks computed in other numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import DataParallelStrategy, HybridStrategy
from tests.heard import heard
from tests.ranks import begun_on_one, run_on_ranks
from tests.trainers import trainer

IGNORED = -100


class OfSources(LightningModule):
    """Beside its loss, it computes the loss of some samples, which some batches lack."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        x, target, task = batch
        logits, source = self.head(self.stem(x).tanh()), task == 0
        with torch.no_grad():
            self.log("source", F.cross_entropy(logits[source], target[source]) if source.any() else 0.0)
        return F.cross_entropy(logits, target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def of_sources(strategy: Any, ranks: int) -> tuple[dict[str, Tensor], list[str]]:
    random = torch.Generator().manual_seed(1)
    drawn = torch.randint(3, (24,), generator=random)
    ignored = drawn.masked_fill(torch.rand(24, generator=random) < 0.4, IGNORED)
    tasks = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2] * 3)  # rank 0 has others than rank 1
    module, data = OfSources(), TensorDataset(torch.randn(24, 4, generator=random).double(), ignored, tasks)
    with heard() as lines:
        trainer(strategy(), precision="64-true", max_epochs=1).fit(module, DataLoader(data, 8 // ranks))
    return module.state_dict(), [line for line in lines if "losses" in line]


def test_losses_that_do_not_learn_may_differ_between_ranks() -> None:
    begun = begun_on_one(of_sources, HybridStrategy, 1)
    for weights, told in run_on_ranks(2, of_sources, DataParallelStrategy, 2):
        assert told == []
        for name, weight in begun.result()[0].items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-9)
