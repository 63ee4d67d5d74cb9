"""Kinds of values that a step computes from its batch: how those of a batch's parts make that of the batch.

The mean loss of a batch is the mean over its parts, a count of hits their sum, a highest value the highest of theirs.
Here is what operations make of kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from torch import Tensor

from lightning_parallel.strategies.logged.functions import FUNCTIONS


class Kind(Enum):
    """How values of parts make that of the whole."""

    SAME = "the same for every part"
    MEAN = "a mean over samples"
    SUM = "a sum over samples"
    SUMMED = "what it was before and a sum over samples"
    MAX = "a maximum over samples"
    MIN = "a minimum over samples"
    SAMPLES = "one entry for each sample"
    SHARES = "one entry for each sample, divided by what counts all of them"
    ONE = "what one of several samples has"
    OTHER = "something else"


MEANS = {"mean", "nanmean"}
SUMS = {"sum", "nansum", "count_nonzero", "dot", "vdot", "inner", "bincount", "histc"}
REDUCED: dict[str, Kind] = {
    **dict.fromkeys(MEANS, Kind.MEAN),
    **dict.fromkeys(SUMS, Kind.SUM),
    **dict.fromkeys(("max", "amax", "any"), Kind.MAX),
    **dict.fromkeys(("min", "amin", "all"), Kind.MIN),
}
ALIKE = {
    *("clone", "detach", "detach_", "to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long"),
    *("cpu", "cuda", "contiguous", "reshape", "view", "squeeze", "unsqueeze", "flatten", "expand", "stack", "cat"),
    *("requires_grad_", "positive", "as_tensor", "tensor", "tolist", "item", "numpy", "__float__", "__int__", "ravel"),
    *("nan_to_num", "__index__"),
}
ABOUT = {"__len__", "numel", "nelement", "size", "__get__"}
NUMBERS = {"item", "__float__", "__int__", "__index__", *ABOUT}
PLUS = {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "rsub"}
TIMES = {"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"}
OVER = {"div", "div_", "__truediv__", "__itruediv__", "true_divide", "divide", "__div__"}
NEGATED = {"neg", "__neg__"}
OF_SHARES = ALIKE | TIMES | OVER | NEGATED | {"where", "masked_fill", "unflatten", "view_as", "reshape_as"}
NORMALISES = {"softmax", "normalize"}
OF_MULTIPLES = ALIKE | PLUS | TIMES | OVER | NEGATED
TOGETHER = {"stack", "cat", "hstack", "vstack", "concat", "concatenate", "tensor", "as_tensor"}
MOST_DIMS, MOST_PARTS = 4, 64
LINEAR = {Kind.SAME, Kind.MEAN, Kind.SUM}
ENTRIES = {Kind.SAMPLES, Kind.SHARES}


def row_taken(name: str, args: Any) -> int | None:
    """The number of the row that an operation takes out of a tensor, 0 for all one by one; None where it does not."""
    if name in ("unbind", "__iter__"):
        return None if args[1:] and args[1] != 0 else 0
    if name == "select":
        return args[2] if len(args) == 3 and args[1] == 0 else None
    if name != "__getitem__":
        return None
    first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
    return first if type(first) is int else None


def keeps(name: str, kind: Kind) -> bool:
    """Whether an operation on entries of one kind gives that kind."""
    if name in ("sum", "mean", "nanmean", "nansum"):
        return kind in LINEAR
    if name in FUNCTIONS:  # which all grow
        return kind in (Kind.MAX, Kind.MIN)
    return REDUCED.get(name) is kind


def sum_of(kinds: set[Kind], numbers: Iterable[float]) -> Kind:
    """The kind of a sum of values of these kinds, and of numbers."""
    kinds = kinds | {Kind.SAME} if any(numbers) else kinds
    varying = kinds - {Kind.SAME}
    if len(varying) > 1:
        return Kind.SUMMED if varying == {Kind.SUM, Kind.SUMMED} else Kind.OTHER
    (kind,) = varying
    return Kind.SUMMED if kind is Kind.SUM and Kind.SAME in kinds else kind


def set_in(target: Kind, value: Kind | None) -> Kind:
    """The kind of a state in which entries were set."""
    kinds = {target, value} - {Kind.SAME}
    allowed = [kind for kind in (Kind.MEAN, Kind.SUMMED) if kinds == {kind}]
    return allowed[0] if allowed else Kind.OTHER if kinds else Kind.SAME


def product_of(kinds: Sequence[Kind]) -> Kind:
    """The kind of a product."""
    varying = [kind for kind in kinds if kind is not Kind.SAME]
    if len(varying) == 1 and varying[0] in LINEAR:
        return varying[0]
    return Kind.SUM if sorted(kind.name for kind in varying) == ["MEAN", "SUM"] else Kind.OTHER


def quotient_of(upper: Kind, lower: Kind) -> Kind:
    """The kind of a quotient."""
    if lower is Kind.SAME:
        return upper if upper in LINEAR else Kind.OTHER
    return Kind.MEAN if (upper, lower) == (Kind.SUM, Kind.SUM) else Kind.OTHER


def reduction(name: str, before: Sequence[Kind], kwargs: Any) -> Kind:
    """The kind that a reduction of a tensor with samples makes; `before`: of what it reads."""
    if Kind.SHARES in before:
        return Kind.MEAN if name in SUMS else Kind.OTHER
    if name.endswith("_loss") or name.startswith(("cross_entropy", "binary_cross_entropy", "kl_div")):
        return {"mean": Kind.MEAN, "batchmean": Kind.MEAN, "sum": Kind.SUM}.get(
            kwargs.get("reduction", "mean"), Kind.OTHER
        )
    return REDUCED.get(name, Kind.OTHER)


def entries(name: str, before: Sequence[Kind], divisor: Kind | None, args: Any, kwargs: Any) -> Kind:
    """The kind of what was made of tensors with samples, and has samples still."""
    adds_up_to_one = divisor in (Kind.SUM, Kind.OTHER) or (name in NORMALISES and 0 in dims_of(args, kwargs))
    return Kind.SHARES if adds_up_to_one or (Kind.SHARES in before and name in OF_SHARES) else Kind.SAMPLES


def reduces_samples(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the first dimension, that of samples, is among those that are reduced."""
    return name in REDUCED and (name in ("bincount", "histc") or 0 in dims_of(args, kwargs))


def dims_of(args: Any, kwargs: Any) -> Sequence[Any]:
    """The dimensions that an operation is given, by name or next to its tensor."""
    dims = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 and not isinstance(args[1], Tensor) else None))
    return dims if isinstance(dims, (tuple, list)) else (dims,)


def common(kinds: Iterable[Kind | None], by_value: bool = False) -> Kind | None:
    """The kind of values of all parts.

    Args:
        kinds: those that were seen.
        by_value: whether they are known by their values: then one that is like no other value tells most.
    """
    found = set(kinds)
    varying = found - {Kind.SAME, None}
    if by_value and (Kind.SAME in found or not varying):
        return Kind.SAME if Kind.SAME in found else None
    if not varying:
        return None if None in found else Kind.SAME
    return varying.pop() if len(varying) == 1 else Kind.OTHER
