"""Finds in a value's graph how it depends on some others: as a sum of multiples of them, or otherwise."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

LINEAR = {"Add", "Sub", "Rsub", "Neg", "Mul", "Div", "ToCopy", "Clone", "Alias", "View", "Reshape", "Expand", "Squeeze",
          "Unsqueeze", "Select", "Stack", "Cat", "Sum", "Mean"}  # fmt: skip
"""The operations that make sums of multiples, by the names of their backwards."""

PRODUCTS = {"Mul", "Div"}
STEPS = 64
"""How far to look: a loss is put together from few parts; what lies behind these is the model."""


def linear_in(value: Tensor, edges: Sequence[GradientEdge | None]) -> list[int]:
    """The numbers of those of which a value is a sum of multiples; it may have other parts besides."""
    numbers = {id(edge.node): number for number, edge in enumerate(edges) if edge is not None}
    found: dict[bool, set[int]] = {True: set(), False: set()}
    ahead: deque[tuple[Any, bool]] = deque([] if value.grad_fn is None else [(value.grad_fn, True)])
    seen = 0
    while ahead and seen < STEPS:
        node, linear = ahead.popleft()
        seen += 1
        if id(node) in numbers:
            found[linear].add(numbers[id(node)])
            continue
        name, before = operation_of(node), [parent for parent, _ in node.next_functions if parent is not None]
        linear = linear and name in LINEAR and not (name in PRODUCTS and len(before) > 1)
        ahead.extend((parent, linear) for parent in before)
    return sorted(found[True] - found[False])


def operation_of(node: Any) -> str:
    """The name of the operation of which a node of a graph is the backward."""
    name: str = node.name().rstrip("0123456789").removesuffix("Backward")
    return name.removeprefix("Unsafe").removeprefix("_")
