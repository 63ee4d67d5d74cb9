"""Finds in a value's graph how it depends on some others: as a sum of multiples of them, or otherwise."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

LINEAR = {"Add", "Sub", "Rsub", "Neg", "Mul", "Div", "ToCopy", "Clone", "Alias", "View", "Reshape", "Expand", "Squeeze",
          "Unsqueeze", "Select", "Stack", "Cat", "Sum", "Mean"}  # fmt: skip
"""The operations that make sums of multiples, by the names of their backwards."""

PRODUCTS = {"Mul", "Div"}
MULTIPLES = LINEAR - {"Mean"} | {"Permute", "Total"}
"""Those that make no means, and more: `einsum` permutes, and what ranks have divided is summed up."""

SUMS = {"Sum", "Nansum", "Dot", "Vdot", "Mv", "Mm", "Bmm"}
SELECTIONS = ("IndexBackward", "IndexSelectBackward", "MaskedSelectBackward")
NEAR = 16
"""How far behind a mean to look for a selection: every mean that a step makes is asked."""
STEPS = 64
"""How far to look: a loss is put together from few parts; what lies behind these is the model."""


@torch.no_grad()
def multiples_in(start: Any, edges: Sequence[GradientEdge | None]) -> dict[int, Tensor]:
    """The factors, by their numbers, of those of which a value is a sum of multiples; it may have other parts besides.

    Nodes are called one by one: the engine would go on behind the first of them, where a graph may have been freed.

    Args:
        start: the node that made the value, a number.
        edges: where the others come from; none for those that are out of question.
    """
    numbers = {edge.node: number for number, edge in enumerate(edges) if edge is not None}
    seen = [*_behind(start, numbers)]
    elsewise = {node for node, linear in seen if not linear}
    leads = {node for node, linear in seen if linear and node in numbers and node not in elsewise}
    for node, linear in reversed(seen):
        if linear and node not in numbers and any(parent in leads for parent, _ in node.next_functions):
            leads.add(node)
    factors: dict[int, Tensor] = {}
    paths = [(start, _one(start))] if start in leads else []
    while paths:
        node, factor = paths.pop()
        if node in numbers:
            factors[numbers[node]] = factors.get(numbers[node], 0) + factor
            continue
        back = node(factor)
        behind = zip(node.next_functions, back if isinstance(back, tuple) else (back,), strict=True)
        paths.extend((parent, each) for (parent, _), each in behind if parent in leads)
    return factors


def linear_nodes(start: Any, edges: Sequence[GradientEdge | None]) -> list[Any]:
    """The nodes of numbers from a value's to those of others, through which it may be a sum of multiples of these."""
    ends = {edge.node for edge in edges if edge is not None}
    return [node for node, linear in _behind(start, ends) if linear and node not in ends and not _made(node).shape]


def elements_of(start: Any, edges: Sequence[GradientEdge | None]) -> int:
    """By how much a sum over elements was divided to make a number; 0 of one that is not made of such sums alone.

    It is 1 of such a sum, or a sum of multiples of them, and the number of elements of their plain mean.

    Args:
        start: the node that made the number.
        edges: where others come from of which it must not be made, see `multiples_in`.
    """
    elements = 1 if _is_only_of(start, _is_sum, MULTIPLES) else _averaged(start)
    return 0 if elements and has_any_of(start, edges) else elements


def has_any_of(start: Any, edges: Sequence[GradientEdge | None]) -> bool:
    """Whether what a node made is a sum of multiples of some of the others, with or without anything else."""
    ends = {edge.node for edge in edges if edge is not None}
    return any(linear and node in ends for node, linear in _behind(start, ends))


def _averaged(node: Any) -> int:
    elements = 0
    while node is not None and operation_of(node) == "Mean":
        node = node.next_functions[0][0]
        elements = 0 if node is None else math.prod(_made(node).shape)
    return elements


def is_made_of(start: Any, edges: Sequence[GradientEdge | None]) -> bool:
    """Whether a number is a sum of multiples of the others and of nothing else with a gradient; see `elements_of`."""
    ends = {edge.node for edge in edges if edge is not None}
    return _is_only_of(start, ends.__contains__, LINEAR)


def _is_only_of(start: Any, is_end: Callable[[Any], bool], through: Collection[str]) -> bool:
    ahead = [start]
    for _ in range(STEPS):
        node = ahead.pop()
        if not is_end(node):
            name, before = operation_of(node), [parent for parent, _ in node.next_functions if parent is not None]
            if name not in through or (name in PRODUCTS and len(before) > 1):
                return False
            ahead.extend(before)
        if not ahead:
            return True
    return False


def _is_sum(node: Any) -> bool:
    is_sum = operation_of(node) in SUMS and math.prod(_made(node).shape) == 1
    return is_sum or getattr(node, "_saved_reduction", 0) == 2  # that of a loss function, by torch's number


def is_of_selection(start: Any) -> bool:
    """Whether what a node made has an element, or a row, for each of those that were selected from something."""
    rows = None if start is None else _made(start).shape[:1]
    ahead = [(start, rows)] if rows else []
    for node, rows in islice(ahead, NEAR):  # which grows meanwhile
        name = type(node).__name__
        if name.startswith(SELECTIONS):
            return True
        joins = name.startswith("CatBackward")
        for parent, _ in node.next_functions:  # asked of every mean: without a call of `_made`
            if parent is not None and (joins or parent._input_metadata[0].shape[:1] == rows):
                ahead.append((parent, parent._input_metadata[0].shape[:1]))
    return False


def adds_mean_of_selection(start: Any, edges: Sequence[GradientEdge | None]) -> bool:
    """Whether a number is made of a mean of what was selected from something that is none of the others."""
    ends = {edge.node for edge in edges if edge is not None}
    return any(
        linear and node not in ends and operation_of(node) == "Mean" and is_of_selection(node.next_functions[0][0])
        for node, linear in _behind(start, ends)
    )


def leaf_near(start: Any) -> Tensor | None:
    """The leaf that is next to a node, behind it; None where there is none near."""
    ahead = [start]
    for node in islice(ahead, NEAR):  # which grows meanwhile
        if (leaf := getattr(node, "variable", None)) is not None:
            return leaf  # type: ignore[no-any-return]
        for parent, _ in node.next_functions:
            if parent is not None:
                ahead.append(parent)
    return None


def _one(node: Any) -> Tensor:
    return torch.ones((), dtype=_made(node).dtype, device=_made(node).device)


def _made(node: Any) -> Any:
    """Shape, dtype and device of what a node's operation returned."""
    return node._input_metadata[0]


def _behind(start: Any, ends: Collection[Any]) -> Iterator[tuple[Any, bool]]:
    """The first nodes behind one, and whether a value is a sum of multiples of theirs; nothing behind an end."""
    ahead: deque[tuple[Any, bool]] = deque([] if start is None else [(start, True)])
    for _ in range(STEPS):
        if not ahead:
            return
        node, linear = ahead.popleft()
        yield node, linear
        if node not in ends:
            name, before = operation_of(node), [parent for parent, _ in node.next_functions if parent is not None]
            linear = linear and name in LINEAR and not (name in PRODUCTS and len(before) > 1)
            ahead.extend((parent, linear) for parent in before)


def operation_of(node: Any) -> str:
    """The name of the operation of which a node of a graph is the backward."""
    name: str = node.name().rstrip("0123456789").removesuffix("Backward")
    return name.removeprefix("Unsafe").removeprefix("_")
