"""How a value depends on some others, as its graph says: as a sum of multiples of them, or otherwise."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

LINEAR = {"Add", "Sub", "Rsub", "Neg", "Mul", "Div", "ToCopy", "Clone", "Alias", "View", "Reshape", "Expand", "Squeeze",
          "Unsqueeze", "Select", "Stack", "Cat", "Sum", "Mean"}  # fmt: skip
"""The operations that make sums of multiples, by the names of their backwards."""

PRODUCTS = {"Mul", "Div"}
STEPS = 64
"""How far to look: a loss is put together from few parts; what lies behind these is the model."""


@dataclass(frozen=True)
class Reach:
    """Where a value came from.

    Attributes:
        linear: the numbers of those of which it is a sum of multiples.
        bent: the numbers of those on which it depends otherwise.
        rest: whether it has other parts besides.
    """

    linear: list[int]
    bent: list[int]
    rest: bool


def reach(value: Tensor, edges: Sequence[GradientEdge | None]) -> Reach:
    """Looks from a value to where others came from in the graph."""
    numbers = {id(edge.node): number for number, edge in enumerate(edges) if edge is not None}
    found: dict[bool, set[int]] = {True: set(), False: set()}
    ahead: deque[tuple[Any, bool]] = deque([] if value.grad_fn is None else [(value.grad_fn, True)])
    seen, rest = 0, False
    while ahead and seen < STEPS:
        node, linear = ahead.popleft()
        seen += 1
        if id(node) in numbers:
            found[linear].add(numbers[id(node)])
            continue
        name, before = _operation(node), [parent for parent, _ in node.next_functions if parent is not None]
        rest = rest or (linear and name not in LINEAR)
        linear = linear and name in LINEAR and not (name in PRODUCTS and len(before) > 1)
        ahead.extend((parent, linear) for parent in before)
    return Reach(sorted(found[True] - found[False]), sorted(found[False]), rest)


def _operation(node: Any) -> str:
    name: str = node.name().rstrip("0123456789").removesuffix("Backward")
    return name.removeprefix("Unsafe").removeprefix("_")
