"""What blocks are given: each tensor as another object in the same memory, which tells in whose hands it is.

A block may keep what it was given in Python state, where another block finds it. On another rank nobody keeps it there.
So what a block was given counts as made in it wherever else it is read.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_parallel.techniques.observed.known import KnownTensors, alias_of
from lightning_parallel.techniques.observed.positions import Made
from lightning_parallel.techniques.observed.shapes import MARK


class GivenTensors:
    """The tensors that blocks were given.

    Args:
        parameters: ids of the model's own, which are there on every stage that reads them.
        known: tensors into which no parameter goes.
    """

    def __init__(self, parameters: Container[int], known: KnownTensors) -> None:
        self._parameters, self._known = parameters, known
        self._originals: Any = WeakIdKeyDictionary()
        self._written: list[tuple[Tensor, Tensor, Made]] = []

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> tuple[Any, Any]:
        """A block is about to run: what it is to get. Lists and mappings, which it may write to, stay what they are."""
        self._written = []
        return tuple(self._given(value, position) for value in args), {
            name: self._given(value, position) for name, value in kwargs.items()
        }

    def leave(self) -> None:
        """The block has run: what it changed in place is changed for its caller too."""
        for alias, original, mark in self._written:
            now = vars(alias).get(MARK)
            if now is not None and now is not mark:
                vars(original)[MARK] = now
        self._written = []

    def original(self, tensor: Tensor, position: int) -> Tensor:
        """What a block that runs here was given for a tensor by its caller; the tensor itself anywhere else."""
        given: Tensor | None = None
        place, given = self._originals.get(tensor, (None, None))
        return tensor if given is None or place != position else given

    def _given(self, value: Any, position: int) -> Any:
        if type(value) is tuple:
            return tuple(self._given(each, position) for each in value)
        if not isinstance(value, Tensor) or id(value) in self._parameters:
            return value
        alias, mark = alias_of(value), Made(position)
        if MARK in vars(value) or value.is_meta:
            vars(alias)[MARK] = mark
            self._written.append((alias, value, mark))
        else:
            self._known.note(alias, mark)
        self._originals[alias] = position, value
        return alias
