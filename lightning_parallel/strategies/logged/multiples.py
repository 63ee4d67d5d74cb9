"""What means over targets contribute to the values that a step logs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_parallel.strategies.logged.functions import undone
from lightning_parallel.strategies.logged.kind_watch import KindWatch
from lightning_parallel.strategies.logged.kinds import Kind
from lightning_parallel.techniques.tools.means import Mean, Means


class Counted(NamedTuple):
    """A logged value, and by what it counts.

    Attributes:
        value: as it is logged.
        parts: what means contribute to it, or to what `function` was taken of.
        function: that it is of a mean, see `functions`; empty for none.
    """

    value: Any
    parts: dict[Mean, Tensor]
    function: str = ""


class _Made(NamedTuple):
    """The number of the mean of which a value was made, where so many were known."""

    number: int
    known: int


class Multiples:
    """Tells what means contribute to logged values.

    A value with a graph tells by itself what it is a sum of. One without, as in an evaluation, may be a multiple of a
    mean: the first batches of a hook tell, by name, for there what a step computes is watched.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], _Made | None] = {}
        self._functions: dict[tuple[str, str], str] = {}

    def counted(self, hook: str, name: str, value: Any, means: Means | None, watch: KindWatch | None) -> Counted:
        """By what a logged value counts.

        Args:
            hook: in which it is logged.
            name: under which.
            value: a tensor or a number, as it was logged.
            means: of the step, if it is known to be made of any.
            watch: sees what the step computes; None after the first batches.
        """
        if means is not None and isinstance(value, Tensor) and (parts := means.parts_of(value)):
            return Counted(value, {mean: part.detach().clone() for mean, part in parts.items()})  # as they are now
        function, given = self._function_of((hook, name), value, means, watch)
        if means is None:
            return Counted(value, {}, function)
        return Counted(value, self._without_graph((hook, name), given, means, watch), function)

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
    ) -> dict[Mean, Tensor]:
        if watch is not None:
            made = _made_of(value, means, watch)
            self._made[key] = made if self._made.get(key, made) == made else None
        made = self._made.get(key)
        if made is None or made.known != len(means.all):
            return {}
        return {means.all[made.number]: _as_tensor(value).clone()}


def _as_tensor(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64).detach()


def _seen_function(value: Any, means: Means | None, watch: KindWatch) -> tuple[str, Any]:
    function, given = watch.function_of(value)
    noted = function and means is not None and _made_of(given, means, watch)
    return (function, given) if noted or watch.kind_of(given) is Kind.MEAN else ("", value)


def _made_of(value: Any, means: Means, watch: KindWatch) -> _Made | None:
    root = watch.root_of(value)
    ends = {each.data_ptr() for each in (value, root) if isinstance(each, Tensor)}
    for number, mean in enumerate(means.all):
        if not ends.isdisjoint((mean.given.data_ptr(), mean.value.data_ptr())):
            return _Made(number, len(means.all))
    return None
