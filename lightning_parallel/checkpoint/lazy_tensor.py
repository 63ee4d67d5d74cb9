"""Tensors that are still on the disk: they have a shape and a dtype, and are read when and as far as they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Read = Callable[[], Tensor]
Piece = tuple[tuple[int, ...], tuple[int, ...], Read]
"""A contiguously stored box of a tensor: its first element, its shape, and a function that reads it."""

IN_ORDER = (None, torch.contiguous_format, torch.preserve_format)
"""The memory formats that `read` returns, as arguments of `clone`."""


class LazyTensor(Tensor):
    """A tensor of a checkpoint, or a box of it, that is read on use.

    Slicing returns a smaller box; every other operation reads the box. If an operation changes it or returns a view of
    it, the full tensor is read and kept: from then on this behaves like an ordinary tensor.

    Args:
        dtype: of the tensor.
        shape: of the tensor.
        pieces: the stored boxes that make up the tensor.
        of: the tensor of which this one is a box; None if it is the full tensor.
        box: the slice of that tensor in each dimension.
    """

    _pieces: Sequence[Piece]
    _of: LazyTensor
    _box: tuple[slice, ...]
    _full: Tensor | None

    def __new__(  # noqa: D102
        cls,
        dtype: torch.dtype,
        shape: Sequence[int],
        pieces: Sequence[Piece] = (),
        of: LazyTensor | None = None,
        box: Sequence[slice] | None = None,
    ) -> LazyTensor:
        make: Any = Tensor._make_wrapper_subclass
        tensor: LazyTensor = make(cls, shape, dtype=dtype, device="cpu")
        tensor._pieces, tensor._of, tensor._full = pieces, tensor if of is None else of, None
        tensor._box = tuple(slice(0, size) for size in shape) if box is None else tuple(box)
        return tensor

    def read(self) -> Tensor:
        """Return an ordinary tensor with the values: newly read, or a view of the full tensor once that is kept."""
        if self._of._full is not None:
            return self._of._full[self._box]
        result: Tensor | None = None
        for offset, shape, read in self._of._pieces:
            # The overlap of this box and the piece, as (start, stop) in each dimension of the full tensor.
            sides = list(zip(self._box, offset, shape, strict=True))
            overlap = [(max(box.start, first), min(box.stop, first + size)) for box, first, size in sides]
            if any(start >= stop for start, stop in overlap):
                continue
            part = read()[tuple(slice(a - first, b - first) for (a, b), first in zip(overlap, offset, strict=True))]
            if part.shape == self.shape:  # most boxes lie in one piece
                return part.clone(memory_format=torch.contiguous_format)
            result = torch.zeros(self.shape, dtype=self.dtype) if result is None else result
            into = tuple(slice(a - box.start, b - box.start) for (a, b), box in zip(overlap, self._box, strict=True))
            result[into] = part
        return torch.zeros(self.shape, dtype=self.dtype) if result is None else result

    def keep(self) -> Tensor:
        """Read the full tensor once, and return the values as a view of it, so that all users share one memory."""
        if self._of._full is None:
            self._of._full = self._of.read()
        return self._of._full[self._box]

    def _sliced(self, dim: int = 0, start: int | None = None, stop: int | None = None) -> LazyTensor:
        box = [*self._box]
        first, last, _ = slice(start, stop).indices(self.shape[dim])
        box[dim] = slice(box[dim].start + first, box[dim].start + max(first, last))
        return LazyTensor(self.dtype, [side.stop - side.start for side in box], of=self._of, box=box)

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first, aten = args[0] if args else None, torch.ops.aten
        if isinstance(first, LazyTensor) and first._of._full is None:
            if func is aten.slice.Tensor and len(args) < 5:  # without a step
                return first._sliced(*args[1:])
            if func is aten.detach.default:
                return LazyTensor(first.dtype, first.shape, of=first._of, box=first._box)
            if func is aten.clone.default and len(args) == 1 and (kwargs or {}).get("memory_format") in IN_ORDER:
                return first.read()

        def materialize(given: Any, argument: Any) -> Any:
            # An argument with alias information is changed, or the result is a view of it.
            change = LazyTensor.read if argument.alias_info is None else LazyTensor.keep
            return pytree.tree_map_only(LazyTensor, change, given)

        arguments = func._schema.arguments
        by_name = {argument.name: argument for argument in arguments}
        args = [materialize(given, argument) for given, argument in zip(args, arguments, strict=False)]
        return func(*args, **{name: materialize(given, by_name[name]) for name, given in (kwargs or {}).items()})

    def numpy(self, **options: Any) -> Any:  # noqa: D102
        return self.keep().numpy(**options)

    def tolist(self) -> Any:  # noqa: D102
        return self.read().tolist()

    @property
    def data(self) -> Tensor:  # type: ignore[override]  # noqa: D102
        return self.keep()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.read().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.read().clone()
        return plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def all_of(shape: Sequence[int], read: Read) -> list[Piece]:
    """Return the pieces of a tensor that is stored contiguously."""
    return [((0,) * len(shape), tuple(shape), read)]


def in_memory(value: Any) -> Any:
    """Return a nested value with all stored tensors read into memory."""
    return pytree.tree_map_only(LazyTensor, LazyTensor.read, value)
