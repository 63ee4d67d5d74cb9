"""Reductions of what ranks log of one batch to the batch's value; what `reduce_fx` does with batches comes after that.

A mean over the batch is the mean over ranks, a count their sum, a highest value their highest, whatever `reduce_fx` is:
an epoch's sum of batch means is the sum of the means of whole batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule

from lightning_parallel.strategies.logged.kinds import Kind, common
from lightning_parallel.strategies.logged.known_kinds import PATIENCE, Kinds
from lightning_parallel.strategies.ranks.agreement import gather_objects

HOW = {Kind.MEAN: "mean", Kind.SAME: "mean", Kind.SUM: "sum", Kind.MAX: "max", Kind.MIN: "min"}
"""How values of parts make that of the whole; for other kinds it is what `reduce_fx` suggests."""

ROUNDING = 1e-6

UNSEEN = (
    "combined from the parts of a batch by reduce_fx, since whether it is a mean, a count, a maximum or a minimum over "
    "the samples could not be seen; where that is wrong, pass another reduce_fx to self.log"
)


@dataclass(frozen=True)
class SeenKind:
    """The kind of a value that a step logged, as far as it was seen.

    Attributes:
        kind: its kind, if it is known.
        number: the value itself where it is a number, of which kinds are guessed from values.
        value: the value, whatever it is; it may show that a kind that was seen is none.
        function: that it is of a mean, see `functions`; empty for none.
    """

    kind: Kind | None
    number: float | None = None
    value: float | None = field(default=None, compare=False)
    function: str = ""

    @classmethod
    def of(cls, kind: Kind | None, value: Any, samples: int | None, reduction: str, doubtful: bool) -> SeenKind:
        """Of a value that was given to `self.log`.

        Args:
            kind: as a watch saw it.
            value: as it was given.
            samples: on how many the step ran.
            reduction: the name of its `reduce_fx`.
            doubtful: whether counts of samples may be numbers that are like them by chance, as all that are numbers.
        """
        by_chance = not isinstance(value, Tensor) or (doubtful and value.is_floating_point())  # no mean is an integer
        if kind is Kind.SUM and reduction != "sum" and by_chance:
            kind = Kind.OTHER
        if not isinstance(value, Tensor):
            return cls(None if value == 1 != samples else kind, float(value), float(value))  # many tensors have size 1
        if kind is not Kind.SAME:
            return cls(Kind.OTHER if kind is Kind.SAMPLES else kind)
        with torch._C.DisableTorchFunction():  # a watch would take the number for one of the step's
            return cls(kind, None, value.detach().item())


NOT_SEEN = SeenKind(None)


def joined(parts: Sequence[SeenKind]) -> SeenKind:
    """Joins what all parts of a batch saw of a value."""
    functions = {part.function for part in parts if part.kind is not None}
    if functions - {""}:
        return SeenKind(Kind.MEAN, function=functions.pop()) if len(functions) == 1 else SeenKind(Kind.OTHER)
    numbers = {part.number for part in parts}
    by_value = None not in numbers
    kind = common((part.kind for part in parts), by_value)
    if kind is None and by_value and len(numbers) == 1 and numbers != {0.0}:
        kind = Kind.SAME
    if kind is Kind.SAME and _differ([part.value for part in parts if part.value is not None]):
        kind = Kind.OTHER  # it was made of samples where nobody saw it, as by numpy, or of a copy that learns
    return SeenKind(kind, parts[0].number, parts[0].value)


def _differ(values: Sequence[float]) -> bool:
    """Whether values are others, by more than rounding."""
    return bool(values) and max(values) - min(values) > ROUNDING * max(map(abs, values))


class Reductions:
    """The ways in which steps' values are put together, by hook and name: all ranks agree on them in the first batches.

    Args:
        kinds: what this rank saw.
        host: all ranks.
        tell: says of names what is done with them.
    """

    def __init__(self, kinds: Kinds, host: dist.ProcessGroup, tell: Callable[[list[str], str], None]) -> None:
        self._kinds, self._host, self._tell = kinds, host, tell
        self._decided: dict[tuple[str, str], tuple[SeenKind, int]] = {}
        self._asked = Counter[tuple[str, str]]()
        #: numbers that were 1 on all ranks where none had one sample: where one has, they count no samples either
        self._ones: set[tuple[str, str]] = set()

    def agreed(self, hook: str, seen: Mapping[str, tuple[SeenKind, int]]) -> dict[str, tuple[str | None, int, str]]:
        """The reduction of each name, None where `reduce_fx` is to say; all ranks come with the same names.

        Args:
            hook: in which they were logged.
            seen: of each name its kind, and how many means of their own contribute to its value.

        Returns:
            Beside each reduction, as how many means these count on all ranks: one, where ranks have other numbers. And
            the function that all values are of what is to be put together.
        """
        undecided = [name for name in seen if (hook, name) not in self._decided]
        found = {name: self._decided[hook, name] for name in seen if name not in undecided}
        if undecided:
            said = gather_objects([seen[name] for name in undecided], self._host)
            for name, *of_ranks in zip(undecided, *said, strict=True):
                numbers = {number for _, number in of_ranks}
                own = numbers.pop() if len(numbers) == 1 else 1
                found[name] = self._decide(hook, name, [each for each, _ in of_ranks], own), own
            if self._host.rank() == 0:
                self._tell([name for name in undecided if found[name][0].kind not in HOW], UNSEEN)
        return {name: (HOW.get(seen.kind or Kind.OTHER), own, seen.function) for name, (seen, own) in found.items()}

    def _decide(self, hook: str, name: str, of_ranks: Sequence[SeenKind], own: int) -> SeenKind:
        if all(seen == SeenKind(None, 1.0) for seen in of_ranks):
            self._ones.add((hook, name))
        if (hook, name) in self._ones:
            of_ranks = [SeenKind(None, 1.0) if seen.number == 1.0 else seen for seen in of_ranks]
        sure = common((seen.kind for seen in of_ranks), by_value=of_ranks[0].number is not None)
        whole = joined(of_ranks)
        kind = whole.kind or Kind.OTHER
        self._asked[hook, name] += 1
        if sure is not None or self._asked[hook, name] == PATIENCE:
            self._decided[hook, name] = whole, own
            self._kinds.decide(hook, ("logged", name), (kind,))
        return whole


def reduced(values: Sequence[Tensor], weights: Sequence[float], how: str) -> Tensor:
    """One value from those of the parts of a batch."""
    stacked = torch.stack([value.to(torch.float64) for value in values])
    if how in ("min", "max"):
        result: Tensor = stacked.amin() if how == "min" else stacked.amax()
    elif how == "sum":
        result = stacked.sum()
    else:
        shares = torch.tensor(weights, dtype=torch.float64)
        result = (stacked * shares).sum() / shares.sum()
    kind = values[0].dtype
    return result.to(kind if kind.is_floating_point or how != "mean" else torch.get_default_dtype())


def name_of(reduction: Any) -> str:
    """The name of a `reduce_fx`."""
    return (reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "mean")).lower()


def is_compiled(module: nn.Module) -> bool:
    """Whether parts of a module run as `torch.compile` made them, which nothing can watch from outside."""
    return any(isinstance(part, OptimizedModule) or part._compiled_call_impl is not None for part in module.modules())
