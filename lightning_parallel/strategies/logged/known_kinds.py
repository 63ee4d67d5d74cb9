"""The kinds of a run's values, by their names: they are seen in its first batches and hold from then on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_parallel.strategies.logged.kind_watch import KindWatch
from lightning_parallel.strategies.logged.kinds import Kind, common

PATIENCE = 8
"""How many batches of a kind are watched at most."""

Found = tuple[Kind | None, ...]


class Kinds:
    """The kinds of a run's values, by their names: seen in the first batches, known from then on."""

    def __init__(self) -> None:
        self._known: dict[Any, Found] = {}
        self._watched: Counter[str] = Counter()
        self._open: set[str] = set()
        #: by their names, integers that did not always grow by one: they count samples, not steps
        self.adding: set[Any] = set()
        #: by hook and name, numbers that were 1 where a part had more samples
        self._ones: set[tuple[str, Any]] = set()

    def watch(self, hook: str) -> KindWatch | None:
        """A watch for the next run of a step, as long as something in it is not known."""
        if self._watched[hook] and (hook not in self._open or self._watched[hook] >= PATIENCE):
            return None
        self._watched[hook] += 1
        self._open.discard(hook)
        return KindWatch()

    def of(self, hook: str, name: Any, values: Sequence[Any], seen: Sequence[Kind | None] | None) -> Found:
        """The kinds of what goes by a name; None is what nobody knows yet.

        Args:
            hook: in which it was computed.
            name: by which it is known.
            values: what it is.
            seen: for each of them what a watch saw, if there was one.
        """
        known = self._known.get((hook, name), ())
        known = known if len(known) == len(values) else (None,) * len(values)
        if seen is not None:
            known = tuple(
                common((kind, before), by_value=True) if not isinstance(value, Tensor) else kind or before
                for value, kind, before in zip(values, seen, known, strict=True)
            )
            self._known[hook, name] = known
        if None in known:
            self._open.add(hook)
        return known

    def tells_nothing(self, hook: str, name: Any, value: Any, samples: int) -> bool:
        """Whether a number's kind cannot be seen: it is like too many others.

        So it is with 1, if that is not how many samples there are, and where it was so before. Of one sample the sum,
        the mean and a number are alike, which is no news where the kind is known.
        """
        if isinstance(value, Tensor):
            return False
        if value == 1 != samples:
            self._ones.add((hook, name))
        known = None not in self._known.get((hook, name), (None,))
        return (value == 1 and (hook, name) in self._ones) or (samples == 1 and known)

    def decide(self, hook: str, name: Any, kinds: Found) -> None:
        """All ranks take these."""
        self._known[hook, name] = kinds
