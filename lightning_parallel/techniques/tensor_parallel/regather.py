"""Keeping this rank's part of a gathered input in place of the whole: backward gathers it again.

The weight's gradient needs the whole input. What autograd would keep of it, `lightly_kept` replaces by a note of where
it came from; the gather's own node in the graph keeps the part.
Source: V. Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_parallel.collectives.conjugate import gather_parts_again


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
        gathered: what `gather_parts` returned when told to keep the part.
    """

    def __init__(self, gathered: Tensor) -> None:
        self._storage, self._node = gathered.untyped_storage().data_ptr(), gathered.grad_fn
        self._again: Tensor | None = None
        self.users = 0

    def lightly_kept(self) -> AbstractContextManager[Any]:
        """Inside, autograd keeps notes. A checkpoint keeps nothing anyway: there this does nothing."""
        if self._node is None or _in_checkpoint():
            return nullcontext()
        return saved_tensors_hooks(self._pack, lambda kept: kept.value() if isinstance(kept, _Note) else kept)

    def _pack(self, tensor: Tensor) -> Any:
        same = tensor.untyped_storage().data_ptr() == self._storage and tensor.is_contiguous()
        return _Note(self, tensor.shape) if same else tensor

    def value(self) -> Tensor:
        """Gathers, once for all users."""
        again = gather_parts_again(self._node) if self._again is None else self._again
        self.users -= 1
        self._again = again if self.users else None
        return again


def _in_checkpoint() -> bool:
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
