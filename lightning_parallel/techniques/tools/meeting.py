"""Finds in a loss's graph where samples of a batch meet each other: each rank has its own ones only.

Nodes of a graph know the shapes of what they made, so nothing is computed, and nothing that was saved is looked at:
that would run checkpointed blocks again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_parallel.techniques.tools.reach import LINEAR, operation_of

Shape = tuple[int, ...]

MATRICES = {"Mm", "Addmm", "Bmm", "Baddbmm"}
DISTANCES = {"Cdist", "EuclideanDist"}
ELEMENTWISE = {"Add", "Sub", "Rsub", "Mul", "Div", "Where"}
WITH_CONSTANTS = ELEMENTWISE | {"Mv", "Dot", "Vdot"}
"""What is done to weights with numbers without gradients: with masks, and with the vectors of a spectral norm."""

EXTREMES_AND_SPREADS = {"Amax", "Amin", "Max", "Min", "Median", "Nanmedian", "Prod", "Std", "Var", "Logsumexp",
                        "LinalgVectorNorm", "Norm"}  # fmt: skip
"""What over samples is no sum over them."""

LOOKUPS = {"Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather"}
ENTER = "Enter"
"""What stands behind it is of the whole batch: a function that sees the samples of all ranks (`ParallelPlan`)."""

VIEWS = 4
"""How many views of each sample a step makes at most: these are as many rows of its embeddings."""

NODES = 50_000
"""How far to look in all; a graph of 100 layers has about 5000."""

NEAR = 256
"""How far to look for what is done with means: near the loss."""


class Meeting(NamedTuple):
    """An operation in which samples meet."""

    name: str
    shape: Shape


# -------------------------------------------------------------------- pairs of samples


def meeting_of(loss: Tensor, samples: int) -> Meeting | None:
    """The operation that compares samples of a batch with each other, as a contrastive loss does; None without one.

    The scores of attention are of pairs too, but of positions: they have the samples besides.
    """
    if samples < 2 or loss.grad_fn is None:
        return None
    last = set(_before(loss.grad_fn, stop=MATRICES | {ENTER}))
    for node in _before(loss.grad_fn, stop={ENTER}):
        operands = _operands_of_pairs(node, samples, node in last)
        if operands and all(map(_is_of_samples, operands)):
            gathered = any(map(_was_gathered, operands))
            return None if gathered else Meeting(operation_of(node), _shape(node))
    return None


def _operands_of_pairs(node: Any, samples: int, last: bool) -> list[Any]:
    """The operands of a node whose shapes are of pairs of samples; the last product may have one without gradient."""
    name, shape = operation_of(node), _shape(node)
    if name in MATRICES | DISTANCES and prod(shape[:-2]) == 1:
        operands = [parent for parent, _ in node.next_functions[-2:]]
        differentiable = [operand for operand in operands if operand is not None]
        square = len(shape) > 1 and shape[-1] == shape[-2]
        pairs = _are_pairs(shape[-2:], samples) or (name in MATRICES and square and _sums_over(operands, samples))
        return differentiable if pairs and (None not in operands or (last and square)) else []
    if name in ELEMENTWISE and _are_pairs(shape[:2], samples):
        operands = [_before_broadcast(parent, shape) for parent, _ in node.next_functions]
        sizes = [_shape(operand)[:2] for operand in operands if operand is not None]
        return operands if sorted(sizes) == [(1, shape[1]), (shape[0], 1)] else []
    return []


def _are_pairs(shape: Shape, samples: int) -> bool:
    if len(shape) != 2 or any(size % samples for size in shape):
        return False
    views = [size // samples for size in shape]
    return max(views) <= (VIEWS if views[0] == views[1] else 2) and min(views) > 0


def _sums_over(operands: Sequence[Any], samples: int) -> bool:
    """Whether a product of matrices adds up over the samples, as a cross-correlation of features does."""
    return operands[0] is not None and _shape(operands[0])[-1:] == (samples,)


def _before_broadcast(node: Any, shape: Shape) -> Any:
    while node is not None and _shape(node)[:2] == shape[:2] and operation_of(node) in {"Expand", "Div", "Clone"}:
        node = node.next_functions[0][0]
    return node


def _is_of_samples(node: Any) -> bool:
    """Whether data went into it, which has no gradient; weights are made of parameters alone."""
    for each in _before(node):
        name, parents = operation_of(each), [parent for parent, _ in each.next_functions]
        if name in LOOKUPS or (None in parents and name not in WITH_CONSTANTS):
            return True
    return False


def _was_gathered(node: Any) -> bool:
    """Whether an operand has the samples of other ranks, which may be without gradients."""
    for each in _before(node, stop=MATRICES | {"Convolution"}):
        name, parents = operation_of(each), [parent for parent, _ in each.next_functions]
        if name == "CopySlices" or (name == "Cat" and None in parents):
            return True
        over_ranks = "gather" in name.lower() and name != "Gather" and parents[0] is not None
        if over_ranks and _shape(each)[-1:] == _shape(parents[0])[-1:]:  # features stay, as samples come together
            return True
    return False


# -------------------------------------------------------------------- uses of means


class Uses(NamedTuple):
    """Uses of means over samples in a loss that is no sum of multiples of them.

    Attributes:
        bent: the operation between a mean and the loss that is no multiple of it, or one over samples that makes no
            mean; None without one.
        weighed: the numbers of the means that are multiplied by what is learned.
    """

    bent: str | None
    weighed: list[int]


def uses_of(loss: Tensor, means: Sequence[GradientEdge | None], samples: int) -> Uses:
    """Looks from a loss to the means that are given, and to others over samples."""
    numbers = {id(edge.node): number for number, edge in enumerate(means) if edge is not None}
    ahead: list[tuple[Any, str | None, bool]] = [] if loss.grad_fn is None else [(loss.grad_fn, None, False)]
    weighed, seen = set[int](), set[tuple[Any, str | None, bool]]()
    while ahead and len(seen) < NEAR:
        node, bent, by_learned = ahead.pop(0)
        if (node, bent, by_learned) in seen:
            continue
        seen.add((node, bent, by_learned))
        watched = id(node) in numbers
        if bent and (watched or (_is_over_samples(node, samples) and _is_of_samples(node))):
            return Uses(bent, [])
        if found := _loss_of(node, samples) if watched else _no_sum(node, samples):
            return Uses(found, [])
        if watched:
            weighed |= {numbers[id(node)]} if by_learned else set()
        elif operation_of(node) not in MATRICES | {"Convolution", ENTER}:
            ahead.extend(_further(node, bent, by_learned))
    return Uses(None, sorted(weighed))


def _further(node: Any, bent: str | None, by_learned: bool) -> Iterator[tuple[Any, str | None, bool]]:
    name, parents = operation_of(node), [parent for parent, _ in node.next_functions]
    for number, parent in enumerate(parents):
        others = parents[:number] + parents[number + 1 :]
        if parent is None:
            continue
        learned = name in {"Mul", "Div"} and any(other is not None for other in others)
        if name not in LINEAR or (learned and any(other is not None and _is_of_samples(other) for other in others)):
            yield parent, bent or name, by_learned
        elif name == "Mul" and None in others and _shape(node):
            # by numbers that have no gradient, each by its own: the shares of experts, say, which are means too
            yield parent, bent or name, by_learned
        else:
            yield parent, bent, by_learned or learned


def _is_over_samples(node: Any, samples: int) -> bool:
    """Whether a node is a mean or a sum over the first dimension, which has the samples, and keeps others."""
    return operation_of(node) in {"Mean", "Sum"} and _loses_samples(node, samples)


def _no_sum(node: Any, samples: int) -> str | None:
    """The operation of a node that makes of all samples what is no sum over them; None of any other."""
    before = node.next_functions[0][0] if operation_of(node) in EXTREMES_AND_SPREADS else None
    if before is None or not _shape(before) or _shape(before)[0] % samples:
        return None
    of_all = (_loses_samples(node, samples) or not _shape(node)) and _is_of_samples(before)
    return operation_of(node) if of_all else None


def _loses_samples(node: Any, samples: int) -> bool:
    """Whether a node has no first dimension, which has the samples in what it was made of, and keeps others."""
    if node.next_functions[0][0] is None:
        return False
    shape, before = _shape(node), _shape(node.next_functions[0][0])
    if len(before) < 2 or before[0] % samples or shape[:1] == before[:1]:
        return False
    return shape in (before[1:], (1, *before[1:]), before[2:])


def _loss_of(node: Any, samples: int) -> str | None:
    """The loss function behind a mean that gets means over samples; None where it gets samples."""
    ahead: list[tuple[Any, str | None]] = [(parent, None) for parent, _ in node.next_functions if parent is not None]
    for each, function in islice(ahead, NEAR):  # which grows meanwhile
        if function and _is_over_samples(each, samples) and _is_of_samples(each):
            return function
        if operation_of(each) in LINEAR or function is None:
            bent = function if operation_of(each) in LINEAR else operation_of(each)
            ahead.extend((parent, bent) for parent, _ in each.next_functions if parent is not None)
    return None


# -------------------------------------------------------------------- graphs


def _before(node: Any, stop: set[str] | None = None) -> Iterator[Any]:
    """A node and those before it, up to some operations."""
    ahead, seen = [node], {node}
    while ahead and len(seen) < NODES:
        each = ahead.pop()
        yield each
        if stop and operation_of(each) in stop:
            continue
        for parent, _ in each.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                ahead.append(parent)


def _shape(node: Any) -> Shape:
    """The shape of the first result of a node."""
    made = node._input_metadata
    return tuple(made[0].shape) if made else ()
