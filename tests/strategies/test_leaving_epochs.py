"""Epochs that a module leaves before their data end: on all ranks, or by an error on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    ParallelPlan,
)
from tests.layouts import layouts
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.tiers import covering
from tests.trainers import trainer


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Leaves(LightningModule):
    """Leaves each epoch before its third batch, on some ranks."""

    def __init__(self, by: str, ranks: set[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by, self.ranks, self.begun = by, ranks, 0
        self.layers = nn.Sequential(Layer(), Layer())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LeavesBefore(Leaves):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.begun += 1
        return -1 if batch_idx == 2 and self.global_rank in self.ranks else None


class LeavesAfter(Leaves):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.begun += 1
        self.trainer.should_stop = batch_idx == 1 and self.global_rank in self.ranks


class LeavesLast(Leaves):
    """Stops training in the last batch of the first epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.begun += 1
        if batch_idx == self.trainer.num_training_batches - 1:
            self.trainer.should_stop = self.global_rank in self.ranks


class LeavesByHook(Leaves):
    """Stops training where Lightning's own early stopping does."""

    def on_train_epoch_end(self) -> None:
        self.begun += 1
        self.trainer.should_stop = self.global_rank in self.ranks


class LeavesValidated(LeavesAfter):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self.layers(batch[0]).square().mean())


class LeavesByValidation(LeavesValidated):
    """Stops training after an evaluation."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.begun += 1

    def on_validation_end(self) -> None:
        self.trainer.should_stop = not self.trainer.sanity_checking and self.global_rank in self.ranks


KINDS: dict[str, type[Leaves]] = {
    "before": LeavesBefore,
    "after": LeavesAfter,
    "validated": LeavesValidated,
    "last": LeavesLast,
    "by a hook": LeavesByHook,
    "by a validation": LeavesByValidation,
}


def trained(by: str, ranks: set[int], strategy: Any, batch_size: int) -> Any:
    module = KINDS[by](by, ranks)
    data = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)))
    loaders = [DataLoader(data, batch_size)] * (1 + issubclass(KINDS[by], LeavesValidated))
    trainer(made(strategy), max_epochs=2).fit(module, *loaders)
    return module.begun, {name: value.clone() for name, value in module.state_dict().items()}


def refused(by: str, strategy: Any, batch_size: int) -> None:
    before = "whether an epoch goes on.*on_train_batch_start returns -1"
    with pytest.raises(ValueError, match=before if by == "before" else r"should_stop when all"):
        trained(by, {1}, strategy, batch_size)


LAYOUTS = layouts("data parallel", "zero 1", "zero 3", "tensor parallel")
LAYOUTS |= layouts("pipeline", plan=ParallelPlan(blocks="layers.*"))


@covering(keep=3, layout=LAYOUTS, by=KINDS)
def test_all_ranks_leave_together(layout: str, by: str) -> None:
    _, readers, strategy = LAYOUTS[layout]
    assert_like_one_device(trained, 2, (by, {0}, None, 4), (by, {0, 1}, strategy, 4 // readers))


@pytest.mark.filterwarnings("ignore")
@covering(keep=4, layout=LAYOUTS, by=KINDS)
def test_a_rank_that_leaves_alone_is_an_error_on_all(layout: str, by: str) -> None:
    _, readers, strategy = LAYOUTS[layout]
    run_on_ranks(2, refused, by, strategy, 4 // readers)
