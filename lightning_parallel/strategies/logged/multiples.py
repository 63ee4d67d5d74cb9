"""What means over targets contribute to the values that a step logs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_parallel.strategies.logged.functions import taken, undone
from lightning_parallel.strategies.logged.kind_watch import KindWatch
from lightning_parallel.strategies.logged.kinds import Kind
from lightning_parallel.techniques.tools.means import Means


class Counted(NamedTuple):
    """A logged value, and by what it counts.

    Attributes:
        value: as it is logged.
        parts: what means contribute to it, by their numbers, or to what `function` was taken of.
        function: that it is of a mean, see `functions`; empty for none.
    """

    value: Any
    parts: dict[int, Tensor]
    function: str = ""


class _Made(NamedTuple):
    """How a value was made: of the mean, or else of the quotient, of this number, where so many of both were known."""

    of_quotient: bool
    number: int
    known: tuple[int, int]


class Multiples:
    """Tells what means contribute to logged values.

    A value with a graph tells by itself what it is a sum of. One without, as in an evaluation, may be a multiple of a
    mean: the first batches of a hook tell, by name, for there what a step computes is watched. Such a mean is one that
    the step's `Means` noted, or one sum over samples divided by another, or plain means of as many elements.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], _Made | None] = {}
        self._functions: dict[tuple[str, str], str] = {}

    def counted(self, hook: str, name: str, value: Any, means: Means | None, watch: KindWatch | None) -> Counted:
        """By what a logged value counts.

        A quotient is noted as a mean of its own; over nothing it is 0: other ranks may have some.

        Args:
            hook: in which it is logged.
            name: under which.
            value: a tensor or a number, as it was logged.
            means: of the step, if it is known to be made of any.
            watch: sees what the step computes; None after the first batches.
        """
        if means is not None and isinstance(value, Tensor) and (parts := means.parts_of(value)):
            return Counted(value, {number: part.detach().clone() for number, part in parts.items()})  # as they are now
        function, given = self._function_of((hook, name), value, means, watch)
        if means is None:
            return Counted(value, {}, function)
        made, parts = self._without_graph((hook, name), given, means, watch)
        if made is not given:
            value = taken(function, made).to(value.dtype if isinstance(value, Tensor) else made.dtype)
        return Counted(value, parts, function)

    def _function_of(
        self, key: tuple[str, str], value: Any, means: Means | None, watch: KindWatch | None
    ) -> tuple[str, Any]:
        """Which function of a mean a value is, and of what."""
        if watch is not None:
            function, given = _seen_function(value, means, watch)
            if self._functions.setdefault(key, function) == function:
                return function, given
            self._functions[key] = ""  # not always
        function = self._functions.get(key, "")
        return function, undone(function, _as_tensor(value)) if function else value

    def _without_graph(
        self, key: tuple[str, str], value: Any, means: Means, watch: KindWatch | None
    ) -> tuple[Any, dict[int, Tensor]]:
        if watch is not None:
            made = _made_of(value, means, watch)
            self._made[key] = made if self._made.get(key, made) == made else None
        made = self._made.get(key)
        if made is None or made.known != _known(means):
            return value, {}
        part = _as_tensor(value).clone()
        if not made.of_quotient:
            return value, {made.number: part}
        _, total, divisor = means.quotients[made.number]
        mean, each = torch.where(divisor == 0, torch.zeros_like(part), part), _elements_of(means, total)
        count, floor = means.floor_of(divisor) or (divisor, 0.0)
        means.note(mean, count * each, divisor=divisor * each, floor=floor * each)
        means.all[-1].scale.rests, means.of_logged = True, means.of_logged + 1  # no loss counts by it
        return mean, {len(means.all) - 1: mean}


def _known(means: Means) -> tuple[int, int]:
    """How many means and quotients a step computed; some of them may be logged in some batches only."""
    return len(means.all) - means.of_logged, len(means.quotients)


def _as_tensor(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64).detach()


def _elements_of(means: Means, number: Tensor) -> int:
    """Over how many elements a number without gradient is a plain mean; 1 of any other, as a sum."""
    return next((elements for mean, elements in means.averages if mean is number), 1)


def _seen_function(value: Any, means: Means | None, watch: KindWatch) -> tuple[str, Any]:
    function, given = watch.function_of(value)
    noted = function and means is not None and _made_of(given, means, watch)
    return (function, given) if noted or watch.kind_of(given) is Kind.MEAN else ("", value)


def _made_of(value: Any, means: Means, watch: KindWatch) -> _Made | None:
    root = watch.root_of(value)
    ends = {each.data_ptr() for each in (value, root) if isinstance(each, Tensor)}
    for number, mean in enumerate(means.all):
        if not ends.isdisjoint((mean.given.data_ptr(), mean.value.data_ptr())):
            return _Made(False, number, _known(means))
    for number, (result, total, divisor) in enumerate(means.quotients):
        if result.data_ptr() in ends:
            count, _ = means.floor_of(divisor) or (divisor, 0.0)
            kinds = watch.kind_of(total), watch.kind_of(count)
            elements = {_elements_of(means, total), _elements_of(means, count)}
            of_means = kinds == (Kind.MEAN, Kind.MEAN) and len(elements) == 1 < max(elements)
            return _Made(True, number, _known(means)) if of_means or kinds == (Kind.SUM, Kind.SUM) else None
    return None
