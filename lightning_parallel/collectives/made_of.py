"""What was made of a tensor, kept for as long as the tensor lives and nobody changes it.

What is made may need a collective, so all ranks must find the same. They do for tensors that they have alike, and for
tensors that are the same object for the user's code on all ranks. They need not for what they took of such a tensor:
that of one rank may be a view and live on with it, that of another one a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")

Version = tuple[int, int, int | torch.SymInt]
"""How often a tensor's memory was changed, and which it is: `tensor.data = other` gives it another one.

A storage stands for memory, not its address: that of what ZeRO 3 gathers again is an old one on some ranks only.
"""

KEPT = 8
"""Of how many views of one tensor something is kept: a buffer may be cut in another way with every batch."""


class Made:
    """What was made of one tensor, by name."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get(self, name: Hashable, make: Callable[..., T], *args: Any) -> T:
        """What `make` returns, or returned when it was called under this name."""
        if name not in self._made:
            self._made[name] = make(*args)
        made: T = self._made[name]
        return made


class MadeOf:
    """The memory of what was made of each tensor."""

    def __init__(self) -> None:
        self._kept: Any = WeakIdKeyDictionary()
        """For each tensor its version, and what was made of each view of it."""

    def forget(self) -> None:
        """Lets go of everything, before a step: between steps memory may change without being counted as a version."""
        self._kept = WeakIdKeyDictionary()

    def plain(self, tensor: Tensor) -> Made:
        """What was made of a tensor that all ranks have alike. Views are known by the tensor that they look into."""
        if torch.compiler.is_dynamo_compiling() or tensor.is_inference():  # which tells nobody that it was changed
            return Made()
        base = tensor if tensor._base is None else tensor._base
        return self._made(base, version(tensor), (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()))

    def wrapper(self, tensor: Tensor, own: Tensor) -> Made:
        """What was made of a tensor of which ranks have different elements.

        Args:
            tensor: the same object for the user's code on all ranks.
            own: this rank's elements.
        """
        if torch.compiler.is_dynamo_compiling() or torch.is_inference_mode_enabled():
            return Made()
        return self._made(tensor, version(own), None)

    def _made(self, tensor: Tensor, now: Version, view: Hashable) -> Made:
        before, of_views = self._kept.get(tensor, (None, {}))
        if before != now:
            of_views = {}
            self._kept[tensor] = now, of_views
        if view not in of_views:
            if len(of_views) >= KEPT:
                del of_views[next(iter(of_views))]
            of_views[view] = Made()
        made: Made = of_views[view]
        return made


def version(tensor: Tensor) -> Version:
    """The version of a tensor's values; of one that was made for inference, and in graphs, nobody knows."""
    if torch.compiler.is_dynamo_compiling() or tensor.is_inference():
        return 0, 0, 0
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return tensor._version, 0, 0
    return tensor._version, tensor.untyped_storage()._cdata, tensor.storage_offset()


# ---------------------------------------------------------------- activation checkpointing


def checkpoint_around() -> Any:
    """Return a token of the enclosing checkpoint, or of its recomputation; None outside of one.

    Tokens are equal within one run of one block, and keep nothing alive.
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
