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

    def forget(self) -> None:
        """Lets go of everything, before a step: between steps memory may change without being counted as a version."""
        self._kept.clear()

    def get(self, tensor: Tensor, name: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, from memory where it was made of this tensor before.

        Args:
            tensor: a plain tensor.
            name: of what is made; nothing else gets it.
            make: makes it.
        """
        if torch.compiler.is_compiling() or tensor.is_inference():  # such a tensor tells nobody that it was changed
            return make()
        made, key = self._made_of(tensor), _key(tensor, name)
        if key not in made:
            self.note(tensor, name, make())
        result: T = made[key]
        return result

    def note(self, tensor: Tensor, name: Hashable, value: Any) -> None:
        """Keeps a value for `noted`."""
        made = self._made_of(tensor)
        while len(made) >= KEPT:
            del made[next(iter(made))]
        made[_key(tensor, name)] = value

    def noted(self, tensor: Tensor, name: Hashable) -> Any:
        """What was noted of a tensor that nobody has changed since; None if nothing was."""
        return None if tensor.is_inference() else self._made_of(tensor).get(_key(tensor, name))

    def _made_of(self, tensor: Tensor) -> dict[Hashable, Any]:
        return self._entry(tensor if tensor._base is None else tensor._base).made

    def _entry(self, tensor: Tensor) -> _Entry:
        number, version = id(tensor), tensor._version
        found = self._kept.get(number)
        if found is None or found.tensor() is not tensor or found.version != version:
            found = self._kept[number] = _Entry(weakref.ref(tensor, lambda gone: self._forget(number, gone)), version)
        return found

    def _forget(self, number: int, gone: Any) -> None:
        if number in self._kept and self._kept[number].tensor is gone:
            del self._kept[number]


def _key(tensor: Tensor, name: Hashable) -> Hashable:
    return name, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


class _Entry:
    def __init__(self, tensor: weakref.ref[Tensor], version: int) -> None:
        self.tensor, self.version = tensor, version
        self.made: dict[Hashable, Any] = {}
