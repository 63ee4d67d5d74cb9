"""Tensors into which no parameter goes, as masks and positions, and the modules that returned them.

Another stage does not run these modules, or not with their buffers, so it must get what they returned. The tensors stay
what they are, most of them real: code may decide by their values.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from lightning_parallel.techniques.observed.positions import Made
from lightning_parallel.techniques.observed.shapes import mark_of
from lightning_parallel.values import map_tensors, tensors_of


class KnownTensors:
    """The origins of tensors into which no parameter goes: the module that returned each, or what it is made of.

    Args:
        parameters: ids of the model's own, which are there on every stage that reads them.
    """

    def __init__(self, parameters: Container[int]) -> None:
        self._parameters = parameters
        self._made: Any = WeakIdKeyDictionary()

    def made(self, tensor: Tensor) -> Made | None:
        """The origin of a tensor, with values or without; None if no module returned it or what it is made of."""
        marked = mark_of(tensor)
        found: Made | None = self._made.get(tensor) if marked is None else marked
        return found

    def among(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors among these that have values, and come from modules."""
        return [tensor for tensor in tensors if mark_of(tensor) is None and tensor in self._made]

    def note(self, value: Any, made: Made) -> None:
        """All tensors in a value were made so."""
        for tensor in tensors_of(value):
            self._made[tensor] = made

    def returned(self, output: Any, mark: Callable[[int], Made]) -> Any:
        """Notes the tensors in what a module returned into which no parameter goes, and returns the same.

        A tensor that was already there, as one that the module was given, becomes another object in the same memory:
        from here on the two have different ways to other stages.
        """
        if any(map(self._is_another, tensors_of(output))):
            output = map_tensors(lambda tensor: alias_of(tensor) if self._is_another(tensor) else tensor, output)
        for number, tensor in enumerate(tensors_of(output)):
            if mark_of(tensor) is None and id(tensor) not in self._parameters:
                self._made[tensor] = mark(number)
        return output

    def _is_another(self, tensor: Tensor) -> bool:
        if id(tensor) in self._parameters:
            return False
        made = mark_of(tensor)
        return made is None or bool(made.sources)


def alias_of(tensor: Tensor) -> Tensor:
    """Another object in the same memory."""
    with _disable_current_modes(), torch.no_grad():
        alias = tensor.detach()
    vars(alias).update(vars(tensor))
    return alias
