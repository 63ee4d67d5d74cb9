"""Context parallel on batches that are objects: what is looked into is divided, and other sequences are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_parallel import ContextParallelStrategy, ParallelPlan
from tests.ranks import run_on_ranks
from tests.techniques.test_context_models import TimeFirst, tokens, trained


class Padded:
    """A batch of a class of its own, with the tokens of its samples."""

    def __init__(self, words: Tensor, names: Any = None) -> None:
        self.words, self.names = words, names


class Slotted:
    """A batch without a `__dict__`."""

    __slots__ = ("inside",)

    def __init__(self, words: Tensor) -> None:
        self.inside = {"padded": Padded(words)}


@dataclass
class Columns:
    """A batch into which everybody looks."""

    words: Tensor
    names: Any = None


class OwnBatches(TimeFirst):
    """Tells how many positions this rank's logits have; the batch is of some class, or beside an object of it."""

    def loss(self, batch: Any) -> Tensor:
        first = batch[0] if isinstance(batch, list) else batch
        words = first if isinstance(first, Tensor) else getattr(first, "words", None)
        return super().loss({"words": words, "labels": words})


BESIDE = {
    "an object": (Padded, r"shape \(12, 4\) is an attribute of a Padded, .*make Padded a dataclass, or let collate_fn"),
    "slots, and an object in an object": (Slotted, r"shape \(12, 4\) is an attribute of a Padded"),
    "tokens beside an object with them": (lambda words: [words, Padded(words)], "is an attribute of a Padded"),
    "a dataclass": (Columns, None),
    "an object without tensors": (lambda words: [words, Padded(None, ["a", "b"])], None),
    "an object with other tensors": (lambda words: [words, Padded(torch.ones(4, 3))], None),
}


def own_batches(made: Callable[[Tensor], Any], said: str | None) -> None:
    model: Any = type("Own", (OwnBatches,), {"batches": staticmethod(lambda: [made(tokens(12).T)])})
    strategy = partial(ContextParallelStrategy, 2, plan=ParallelPlan(sequence_dim=0))
    if said is None:
        assert trained(model, strategy)[0]["own"] == 6
        return
    with pytest.raises(ValueError, match=said):
        trained(model, strategy)


@pytest.mark.parametrize("batch", BESIDE)
def test_batches_of_own_classes_are_divided_or_refused(batch: str) -> None:
    run_on_ranks(2, own_batches, *BESIDE[batch])
