"""Keeping this rank's part of a gathered input in place of the whole: backward gathers it again.

The weight's gradient needs the whole input. What autograd would keep of it, `lightly_kept` replaces by a note of where
it came from; the gather's own node in the graph keeps the part.
Source: V. Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks

from lightning_parallel.collectives.by_elements import gathered_again

KEY = "_regathered"
"""The attribute that marks a gathered tensor."""


class _Note:
    """A gathered tensor, or a view of it, that was not kept."""

    def __init__(self, region: Regathered, shape: torch.Size) -> None:
        self.region, self.shape = region, shape
        region.users += 1

    def value(self) -> Tensor:
        """The tensor, gathered once for all who need it."""
        return self.region.value().view(self.shape)


class Regathered:
    """One gathered input, which several maps share.

    Args:
        whole: what `gathered` returned when told to keep the part.
    """

    def __init__(self, whole: Tensor) -> None:
        self._storage, self._node = whole.untyped_storage().data_ptr(), whole.grad_fn
        self._again: Tensor | None = None
        self.users = 0

    def lightly_kept(self) -> AbstractContextManager[Any]:
        """Inside, autograd keeps notes of the whole and of its views."""
        return saved_tensors_hooks(self._pack, lambda kept: kept.value() if isinstance(kept, _Note) else kept)

    def _pack(self, tensor: Tensor) -> Any:
        same = tensor.untyped_storage().data_ptr() == self._storage and tensor.is_contiguous()
        return _Note(self, tensor.shape) if same else tensor

    def value(self) -> Tensor:
        """The whole, gathered once for all users; the last of them lets go of it."""
        again = gathered_again(self._node) if self._again is None else self._again
        self.users -= 1
        self._again = again if self.users else None
        return again


def to_be_regathered(whole: Tensor) -> Tensor:
    """Marks a gathered tensor: its readers need not keep it. A checkpoint keeps nothing anyway."""
    if whole.grad_fn is not None and checkpoint_around() is None:
        vars(whole)[KEY] = Regathered(whole)
    return whole


def lightly_kept(tensors: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Inside, autograd keeps notes in place of tensors that will be gathered again.

    Args:
        tensors: what a product reads; at most one of them was marked by `to_be_regathered`.
    """
    found = next((vars(tensor)[KEY] for tensor in tensors if KEY in vars(tensor)), None)
    return nullcontext() if found is None else found.lightly_kept()


def checkpoint_around() -> Any:
    """Stands for the checkpoint that code runs in, or for one of its recomputations; None where there is none.

    Equal to what is told in the same run of the same block, and to nothing else; it keeps nothing alive.
    """
    hooks: Any = _top_saved_tensors_default_hooks(True)
    return weakref.ref(hooks[0]) if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint" else None


def is_in_checkpoint() -> bool:
    """Whether a checkpoint is around what runs, which no compiler reads."""
    return not torch.compiler.is_dynamo_compiling() and checkpoint_around() is not None


def is_recomputed() -> bool:
    """Whether what runs, and no compiler reads, is what a checkpoint recomputes in backward."""
    hooks: Any = None if torch.compiler.is_dynamo_compiling() else _top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__qualname__.startswith("_recomputation_hook")
