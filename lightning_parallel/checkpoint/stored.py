"""Tensors that are still on the disk: they have a shape and a dtype, and are read where and as far as they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Read = Callable[[], Tensor]
Piece = tuple[tuple[int, ...], tuple[int, ...], Read]
"""A box of a tensor that lies together on the disk: its first element, its shape, and how to read it."""

IN_ORDER = (None, torch.contiguous_format, torch.preserve_format)
"""The memory formats in which a tensor is read."""


class StoredTensor(Tensor):
    """A tensor of a checkpoint, or a box of one.

    Slicing makes a smaller box; every other operation reads this one. Where an operation changes it or returns a view
    of it, the full tensor is read and kept: then this is an ordinary tensor to those who use it.

    Args:
        dtype: of the tensor.
        shape: of the tensor.
        pieces: in which it is stored.
        of: the tensor that this one is a box of.
        box: the slice of that in each dimension.
    """

    _pieces: Sequence[Piece]
    _of: StoredTensor
    _box: tuple[slice, ...]
    _full: Tensor | None

    def __new__(  # noqa: D102
        cls,
        dtype: torch.dtype,
        shape: Sequence[int],
        pieces: Sequence[Piece] = (),
        of: StoredTensor | None = None,
        box: Sequence[slice] | None = None,
    ) -> StoredTensor:
        make: Any = Tensor._make_wrapper_subclass
        made: StoredTensor = make(cls, shape, dtype=dtype, device="cpu")
        made._pieces, made._of, made._full = pieces, made if of is None else of, None
        made._box = tuple(slice(0, size) for size in shape) if box is None else tuple(box)
        return made

    def read(self) -> Tensor:
        """Return an ordinary tensor with the values, in memory of its own unless this one has been changed."""
        if self._of._full is not None:
            return self._of._full[self._box]
        made: Tensor | None = None
        for offset, shape, read in self._of._pieces:
            # Where this box and the piece overlap: from which element to which of the stored tensor.
            sides = list(zip(self._box, offset, shape, strict=True))
            here = [(max(box.start, first), min(box.stop, first + size)) for box, first, size in sides]
            if any(start >= stop for start, stop in here):
                continue
            found = read()[tuple(slice(a - first, b - first) for (a, b), first in zip(here, offset, strict=True))]
            if found.shape == self.shape:  # most boxes lie in one piece
                return found.clone(memory_format=torch.contiguous_format)
            made = torch.zeros(self.shape, dtype=self.dtype) if made is None else made
            into = tuple(slice(a - box.start, b - box.start) for (a, b), box in zip(here, self._box, strict=True))
            made[into] = found
        return torch.zeros(self.shape, dtype=self.dtype) if made is None else made

    def keep(self) -> Tensor:
        """Return the values as a view of a tensor that is the same for all who use it from now on."""
        if self._of._full is None:
            self._of._full = self._of.read()
        return self._of._full[self._box]

    def _sliced(self, dim: int = 0, start: int | None = None, stop: int | None = None) -> StoredTensor:
        box = [*self._box]
        first, last, _ = slice(start, stop).indices(self.shape[dim])
        box[dim] = slice(box[dim].start + first, box[dim].start + max(first, last))
        return StoredTensor(self.dtype, [side.stop - side.start for side in box], of=self._of, box=box)

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first, aten = args[0] if args else None, torch.ops.aten
        if isinstance(first, StoredTensor) and first._of._full is None:
            if func is aten.slice.Tensor and len(args) < 5:  # without a step
                return first._sliced(*args[1:])
            if func is aten.detach.default:
                return StoredTensor(first.dtype, first.shape, of=first._of, box=first._box)
            if func is aten.clone.default and len(args) == 1 and (kwargs or {}).get("memory_format") in IN_ORDER:
                return first.read()

        def value(given: Any, argument: Any) -> Any:
            # An argument with an alias is changed, or lives on in the result.
            change = StoredTensor.read if argument.alias_info is None else StoredTensor.keep
            return pytree.tree_map_only(StoredTensor, change, given)

        known = func._schema.arguments
        named = {it.name: it for it in known}
        args = [value(given, argument) for given, argument in zip(args, known, strict=False)]
        return func(*args, **{name: value(given, named[name]) for name, given in (kwargs or {}).items()})

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
        return f"StoredTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def all_of(shape: Sequence[int], read: Read) -> list[Piece]:
    """Return the pieces of a tensor that lies together on the disk."""
    return [((0,) * len(shape), tuple(shape), read)]


def in_memory(value: Any) -> Any:
    """Return a value without tensors that are still on the disk."""
    return pytree.tree_map_only(StoredTensor, StoredTensor.read, value)
