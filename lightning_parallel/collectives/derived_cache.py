"""Cache of values computed from a tensor, valid while the tensor lives and is not changed.

To compute a value may need a collective, so all ranks must find the same entries. They do for replicated tensors, and
for tensors that are the same object to the user's code on all ranks. They may not for slices of such a tensor: on one
rank the slice may be a view, cached as long as the tensor lives, on another rank a copy.
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
"""How often a tensor's memory was changed, and which memory it is: `tensor.data = other` replaces the memory.

The storage identifies memory, not the address: what ZeRO 3 gathers again has its former address on some ranks only.
"""

KEPT = 8
"""Number of views of one tensor for which values are cached: a buffer may be sliced in another way with every batch."""


class DerivedValues:
    """Values computed from one tensor, by name."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get(self, name: Hashable, make: Callable[..., T], *args: Any) -> T:
        """Return the value cached under `name`; the first call computes it as `make(*args)`."""
        if name not in self._made:
            self._made[name] = make(*args)
        value: T = self._made[name]
        return value


class DerivedCache:
    """Cache of the values computed from each tensor."""

    def __init__(self) -> None:
        self._kept: Any = WeakIdKeyDictionary()
        """For each tensor its version, and the values computed from each view of it."""

    def forget(self) -> None:
        """Clear the cache. Called before a step: between steps memory may change without a new version."""
        self._kept = WeakIdKeyDictionary()

    def plain(self, tensor: Tensor) -> DerivedValues:
        """Return the values computed from a replicated tensor. Views are found by their base tensor and their place."""
        if torch.compiler.is_dynamo_compiling() or tensor.is_inference():  # which has no version
            return DerivedValues()
        base = tensor if tensor._base is None else tensor._base
        return self._made(base, version(tensor), (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()))

    def wrapper(self, tensor: Tensor, own: Tensor) -> DerivedValues:
        """Return the values computed from a tensor of which ranks have different elements.

        Args:
            tensor: the object that the user's code has, the same one on all ranks.
            own: this rank's local elements.
        """
        if torch.compiler.is_dynamo_compiling() or torch.is_inference_mode_enabled():
            return DerivedValues()
        return self._made(tensor, version(own), None)

    def _made(self, tensor: Tensor, now: Version, view: Hashable) -> DerivedValues:
        cached_version, by_view = self._kept.get(tensor, (None, {}))
        if cached_version != now:
            by_view = {}
            self._kept[tensor] = now, by_view
        if view not in by_view:
            if len(by_view) >= KEPT:
                del by_view[next(iter(by_view))]
            by_view[view] = DerivedValues()
        values: DerivedValues = by_view[view]
        return values


def version(tensor: Tensor) -> Version:
    """Return the version of a tensor's values; a constant for inference tensors and in graphs, which have none."""
    if torch.compiler.is_dynamo_compiling() or tensor.is_inference():
        return 0, 0, 0
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return tensor._version, 0, 0
    return tensor._version, tensor.untyped_storage()._cdata, tensor.storage_offset()


# ---------------------------------------------------------------- activation checkpointing


def checkpoint_token() -> Any:
    """Return a token of the enclosing activation checkpoint, or of its recomputation; None outside of one.

    Tokens are equal within one forward or one recomputation of one block, and keep no object alive.
    """
    hooks: Any = _top_saved_tensors_default_hooks(True)
    return weakref.ref(hooks[0]) if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint" else None


def is_in_checkpoint() -> bool:
    """Return whether the running code is inside an activation checkpoint; False while Dynamo traces."""
    return not torch.compiler.is_dynamo_compiling() and checkpoint_token() is not None


def is_recomputed() -> bool:
    """Return whether the running code is a checkpoint's recomputation in backward; False while Dynamo traces."""
    hooks: Any = None if torch.compiler.is_dynamo_compiling() else _top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__qualname__.startswith("_recomputation_hook")
