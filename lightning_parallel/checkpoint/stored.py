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

Span = tuple[int, int]

IN_ORDER = (None, torch.contiguous_format, torch.preserve_format)
"""The forms of memory in which a tensor is read."""


class StoredTensor(Tensor):
    """A tensor of a checkpoint, or a box of one.

    Slicing makes a smaller box; every other operation reads this one. Where an operation changes it or looks at its
    memory, the whole tensor is read and kept: then this is an ordinary tensor to those who use it.

    Args:
        dtype: of the tensor.
        shape: of the tensor.
        pieces: in which it is stored.
        of: the tensor that this one is a box of.
        box: from where to where in each dimension of it.
    """

    def __new__(  # noqa: D102
        cls,
        dtype: torch.dtype,
        shape: Sequence[int],
        pieces: Sequence[Piece] = (),
        of: StoredTensor | None = None,
        box: Sequence[Span] | None = None,
    ) -> StoredTensor:
        make: Any = Tensor._make_wrapper_subclass
        made: StoredTensor = make(cls, shape, dtype=dtype, device="cpu")
        made._pieces, made._of = pieces, made if of is None else of
        made._box = tuple((0, size) for size in shape) if box is None else tuple(box)
        made._whole = None
        return made

    _pieces: Sequence[Piece]
    _of: StoredTensor
    _box: tuple[Span, ...]
    _whole: Tensor | None

    def read(self) -> Tensor:
        """An ordinary tensor with the values, in memory of its own unless this one has been changed."""
        if self._of._whole is not None:
            return self._of._whole[self._slices()]
        made: Tensor | None = None
        for offset, shape, read in self._of._pieces:
            here = [
                (max(start, first), min(stop, first + size))
                for (start, stop), first, size in zip(self._box, offset, shape, strict=True)
            ]
            if all(start < stop for start, stop in here):
                into = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(here, self._box, strict=True))
                out = tuple(slice(a - first, b - first) for (a, b), first in zip(here, offset, strict=True))
                found = read()[out]
                if found.shape == self.shape:  # most boxes lie in one piece
                    return found.clone(memory_format=torch.contiguous_format)
                made = torch.zeros(self.shape, dtype=self.dtype) if made is None else made
                made[into] = found
        return torch.zeros(self.shape, dtype=self.dtype) if made is None else made

    def keep(self) -> Tensor:
        """The values as a part of a tensor that is the same for all who use it from now on."""
        if self._of._whole is None:
            self._of._whole = self._of.read()
        return self._of._whole[self._slices()]

    def _slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self._box)

    def _sliced(self, dim: int = 0, start: int | None = None, stop: int | None = None) -> StoredTensor:
        before, after = self._box[dim]
        size = after - before
        first, last, _ = slice(start, stop).indices(size)
        last = max(first, last)
        box = [*self._box]
        box[dim] = (before + first, before + last)
        return StoredTensor(self.dtype, [b - a for a, b in box], of=self._of, box=box)

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first, aten = args[0] if args else None, torch.ops.aten
        if isinstance(first, StoredTensor) and first._of._whole is None:
            if func is aten.slice.Tensor and len(args) < 5:  # without a step
                return first._sliced(*args[1:])
            if func is aten.detach.default:
                return StoredTensor(first.dtype, first.shape, of=first._of, box=first._box)
            if func is aten.clone.default and len(args) == 1 and (kwargs or {}).get("memory_format") in IN_ORDER:
                return first.read()
        known = func._schema.arguments  # those with an alias are changed, or live on in the result
        args = [_given(value, argument) for value, argument in zip(args, known, strict=False)]
        named = {it.name: it for it in known}
        return func(*args, **{name: _given(value, named[name]) for name, value in (kwargs or {}).items()})

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
    """The pieces of a tensor that lies together on the disk."""
    return [((0,) * len(shape), tuple(shape), read)]


def _given(value: Any, argument: Any) -> Any:
    change = StoredTensor.read if argument.alias_info is None else StoredTensor.keep
    return pytree.tree_map_only(StoredTensor, change, value)


def in_memory(value: Any) -> Any:
    """A value without tensors that are still on the disk."""
    return pytree.tree_map_only(StoredTensor, StoredTensor.read, value)
