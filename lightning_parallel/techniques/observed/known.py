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
    """Where such tensors were returned, and what was made of them between modules.

    Args:
        parameters: ids of the model's own, which are there on every stage that reads them.
    """

    def __init__(self, parameters: Container[int]) -> None:
        self._parameters = parameters
        self._made: Any = WeakIdKeyDictionary()

    def made(self, tensor: Tensor) -> Made | None:
        """Where a tensor comes from, known or not; None if no module returned it or what it is made of."""
        marked = mark_of(tensor)
        found: Made | None = self._made.get(tensor) if marked is None else marked
        return found

    def among(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those without parameters that modules returned, or that were made of such."""
        return [tensor for tensor in tensors if mark_of(tensor) is None and tensor in self._made]

    def note(self, value: Any, made: Made) -> None:
        """All tensors in a value were made so."""
        for tensor in tensors_of(value):
            self._made[tensor] = made

    def returned(self, output: Any, mark: Callable[[int], Made]) -> Any:
        """What a module returned, its tensors without parameters noted.

        A tensor that was already there, as one that the module was given, becomes another object in the same memory:
        from here on the two have different ways to other stages.
        """
        if any(map(self._is_another, tensors_of(output))):
            output = map_tensors(lambda tensor: _alias(tensor) if self._is_another(tensor) else tensor, output)
        for number, tensor in enumerate(tensors_of(output)):
            if mark_of(tensor) is None and id(tensor) not in self._parameters:
                self._made[tensor] = mark(number)
        return output

    def _is_another(self, tensor: Tensor) -> bool:
        if id(tensor) in self._parameters:
            return False
        made = mark_of(tensor)
        return made is None or bool(made.sources)


def _alias(tensor: Tensor) -> Tensor:
    with _disable_current_modes(), torch.no_grad():
        alias = tensor.detach()
    vars(alias).update(vars(tensor))
    return alias
