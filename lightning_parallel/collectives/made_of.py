"""What was made of a tensor, kept for as long as the tensor lives and nobody changes it.

All ranks that do the same with tensors find the same, so what is made may need a collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

KEPT = 8
"""How much is kept of one tensor: a buffer may be cut in another way with every batch."""


class MadeOf:
    """The memory of what was made. Views are known by the tensor that they look into."""

    def __init__(self) -> None:
        self._kept: dict[int, _Entry] = {}

    def get(self, tensor: Tensor, name: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, from memory where it was made of this tensor before.

        Args:
            tensor: a plain tensor.
            name: of what is made; nothing else gets it.
            make: makes it.
        """
        if torch.compiler.is_compiling() or tensor.is_inference():  # such a tensor tells nobody that it was changed
            return make()
        entry = self._entry(tensor if tensor._base is None else tensor._base)
        key = name, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        if key not in entry.made:
            made = make()
            while len(entry.made) >= KEPT:
                del entry.made[next(iter(entry.made))]
            entry.made[key] = made
        result: T = entry.made[key]
        return result

    def _entry(self, tensor: Tensor) -> _Entry:
        number, version = id(tensor), tensor._version
        found = self._kept.get(number)
        if found is None or found.tensor() is not tensor or found.version != version:
            found = self._kept[number] = _Entry(weakref.ref(tensor, lambda gone: self._forget(number, gone)), version)
        return found

    def _forget(self, number: int, gone: Any) -> None:
        if number in self._kept and self._kept[number].tensor is gone:
            del self._kept[number]


class _Entry:
    def __init__(self, tensor: weakref.ref[Tensor], version: int) -> None:
        self.tensor, self.version = tensor, version
        self.made: dict[Hashable, Any] = {}
