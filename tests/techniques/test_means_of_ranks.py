"""Means that ranks computed of other parts of the model, or in other numbers."""

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
    """Beside its loss, it computes the loss of some samples, which some batches lack, or a loss for each task."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.stem = way, torch.nn.Linear(4, 8)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, 3) for _ in range(3))

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        x, target, task = batch
        hidden = self.stem(x).tanh()
        if self.way == "tasks":
            losses = [
                F.cross_entropy(self.heads[k](hidden[task == k]), target[task == k]) for k in sorted({*task.tolist()})
            ]
            return torch.stack(losses).sum()
        logits, source = self.heads[0](hidden), task == 0
        with torch.no_grad():
            self.log("source", F.cross_entropy(logits[source], target[source]) if source.any() else 0.0)
        return F.cross_entropy(logits, target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def of_sources(way: str, strategy: Any, ranks: int) -> tuple[dict[str, Tensor], list[str]]:
    random = torch.Generator().manual_seed(1)
    drawn = torch.randint(3, (24,), generator=random)
    ignored = drawn.masked_fill(torch.rand(24, generator=random) < 0.4, IGNORED)
    tasks = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2] * 3)  # rank 0 has others than rank 1
    module, data = OfSources(way), TensorDataset(torch.randn(24, 4, generator=random).double(), ignored, tasks)
    with heard() as lines:
        trainer(strategy(), precision="64-true", max_epochs=1).fit(module, DataLoader(data, 8 // ranks))
    return module.state_dict(), [line for line in lines if "losses" in line]


def test_losses_that_do_not_learn_may_differ_between_ranks() -> None:
    begun = begun_on_one(of_sources, "sources", HybridStrategy, 1)
    for weights, told in run_on_ranks(2, of_sources, "sources", DataParallelStrategy, 2):
        assert told == []
        for name, weight in begun.result()[0].items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-9)


def test_losses_of_other_heads_on_each_rank_are_told() -> None:
    (_, told), (_, nothing) = run_on_ranks(2, of_sources, "tasks", DataParallelStrategy, 2)
    assert "losses of other parts of the model" in told[0]
    assert nothing == []
