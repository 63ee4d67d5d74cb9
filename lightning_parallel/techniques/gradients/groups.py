"""What the groups of an optimizer hold: parameters as ranks have them, or what stands for these where users look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

Pair = tuple[Tensor, Tensor]
"""A parameter of which ranks hold parts, and what stands for it."""


def exchange(optimizer: Optimizer, pairs: Sequence[Pair]) -> None:
    """Puts the second of each pair where the first is: in groups, and as that which a state belongs to."""
    after_of = {id(before): after for before, after in pairs}
    for group in optimizer.param_groups if pairs else ():
        group["params"][:] = [after_of.get(id(parameter), parameter) for parameter in group["params"]]
    for before, after in pairs:
        if before in optimizer.state:
            optimizer.state[after] = optimizer.state.pop(before)


def turned(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs that take an exchange back."""
    return [(after, before) for before, after in pairs]


class Copies(Protocol):
    """Copies that stand for parameters while a hook of the user's runs."""

    def settle(self) -> None:
        """Parameters become as their copies. ⇄ `follow`."""

    def follow(self) -> None:
        """Copies become as their parameters."""
