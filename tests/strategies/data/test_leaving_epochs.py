"""Epochs that a module leaves before their data end: on all ranks, or by an error on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.layouts import layouts
from tests.models import TiedWords
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.trainers import trainer


class Leaves(TiedWords):
    """Leaves epochs of four batches somewhere, on some ranks."""

    def __init__(self, by: str, ranks: set[int]) -> None:
        super().__init__(blocks=2)
        self.by, self.ranks, self.begun = by, ranks, 0

    def stop(self, by: str, where: bool = True) -> None:
        if self.by == by:
            self.trainer.should_stop = where and self.global_rank in self.ranks

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.begun += 1
        return -1 if self.by == "before" and batch_idx == 2 and self.global_rank in self.ranks else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.stop("after", batch_idx == 1)
        self.stop("last", batch_idx == 3)

    def on_train_epoch_end(self) -> None:  # where Lightning's own early stopping does
        self.stop("by a hook")

    def on_validation_end(self) -> None:
        self.stop("by a validation", not self.trainer.sanity_checking)


KINDS = ("before", "after", "last", "by a hook", "by a validation")


def trained(by: str, ranks: set[int], strategy: Any, batch_size: int, validated: bool) -> Any:
    module, random = Leaves(by, ranks), torch.Generator().manual_seed(1)
    words = TensorDataset(*torch.randint(module.words, (2, 16, 3), generator=random))
    loaders = [DataLoader(words, batch_size)] * (2 if validated or by == "by a validation" else 1)
    trainer(made(strategy), max_epochs=2).fit(module, *loaders)
    return module.begun, {name: value.clone() for name, value in module.state_dict().items()}


def trained_by_all(ranks: set[int], strategy: Any, batch_size: int) -> list[Any]:
    return [trained(by, ranks, strategy, batch_size, validated) for by in KINDS for validated in (False, True)]


def refused(by: str, strategy: Any, batch_size: int) -> None:
    before = "whether an epoch goes on.*return -1 from on_train_batch_start"
    with pytest.raises(ValueError, match=before if by == "before" else r"should_stop on all"):
        trained(by, {1}, strategy, batch_size, False)


LAYOUTS = layouts("pipeline", "data parallel", "zero 3", "tensor parallel")
OTHERS = [pytest.param(layout, marks=pytest.mark.exhaustive) for layout in [*LAYOUTS][1:]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["pipeline", *OTHERS])
def test_ranks_leave_an_epoch_together_or_by_an_error(layout: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    assert_like_one_device(trained_by_all, ranks, ({0}, None, 4), ({0, 1}, strategy, 4 // readers))
    for by in KINDS:
        run_on_ranks(ranks, refused, by, strategy, 4 // readers)
