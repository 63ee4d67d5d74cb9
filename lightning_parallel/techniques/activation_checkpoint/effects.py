"""What a block writes to its own modules, which a recomputation finds as the forward did, and does not write again.

Running statistics, counters, numbers of tokens by expert, a loss that is kept in an attribute for the step to read: a
block that is not recomputed reads and writes them once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_parallel.collectives.made_of import version

OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes in which modules keep their parts, and hooks."""
WATCHED = (bool, int, float, complex, str, type(None), tuple, list, dict, set, Tensor)
"""What may be put back. Modules, functions and other objects stay as they are: nobody knows what is in them."""
HOLDING = frozenset((list, tuple, dict, set))
"""What is copied with what is in it; a block may keep long lists of anything else, which are copied at once."""
ABSENT = object()

Place = tuple[dict[str, Any], str, int]
"""The attributes or the buffers of a module, a key among them, and the number of the module."""
Before = list[tuple[Place, Any]]
"""What modules held at their places."""


class Effects:
    """Watches what a block writes to its modules.

    Args:
        block: whose forward is recomputed.
    """

    def __init__(self, block: nn.Module) -> None:
        parts = list(enumerate(block.modules()))
        self._tables: list[tuple[dict[str, Any], int]] = [
            table for number, part in parts for table in ((vars(part), number), (part._buffers, number))
        ]
        self._places: list[Place] = []
        self._known = -1
        self._writers: set[int] | None = None
        """The numbers of the modules whose tensors the block writes; None before its first forward, which tells."""

    def before(self) -> Before:
        """What the modules hold now: copies of what the block may write to."""
        return [(place, self._kept(table.get(key), number)) for place in self._now() for table, key, number in (place,)]

    def versions(self) -> list[tuple[int, Any]]:
        """By which it is known whose tensors a forward writes, each with the number of its module."""
        held = [(number, table.get(key)) for table, key, number in self._now()]
        return [(number, (id(each), version(each))) for number, each in held if isinstance(each, Tensor)]

    def learn(self, before: list[tuple[int, Any]]) -> None:
        """The forward has run; these were the versions before it.

        Kernels of norms write statistics without counting that as a version, but they count batches beside them.
        """
        changed = {number for number, _ in set(before) ^ set(self.versions())}
        self._writers = changed | (self._writers or set())

    @contextmanager
    def again(self, before: Before) -> Iterator[None]:
        """Inside, the modules hold what they held before the forward; afterwards what they hold now."""
        places = self._now()
        live = [table.get(key, ABSENT) for table, key, _ in places]
        with _disable_current_modes():  # what selective checkpointing remembers is of the forward alone
            for (table, key, number), value in before:
                given = self._kept(value, number)
                if given is not table.get(key) and isinstance(given, WATCHED):
                    table[key] = given
        try:
            yield
        finally:
            if self._now() is not places:
                known = {(id(table), key) for table, key, _ in places}
                for table, key in [(table, key) for table, key, _ in self._now() if (id(table), key) not in known]:
                    if isinstance(table[key], WATCHED):
                        del table[key]
            for (table, key, _), value in zip(places, live, strict=True):
                if table.get(key, ABSENT) is not value and isinstance(value, WATCHED):
                    table[key] = value

    def _now(self) -> list[Place]:
        """The places that there are."""
        count = sum([len(table) for table, _ in self._tables])
        if count != self._known:
            self._known = count
            self._places = [(table, key, n) for table, n in self._tables for key in table if key not in OWN]
        return self._places

    def _kept(self, value: Any, number: int) -> Any:
        if isinstance(value, Tensor):
            written = self._writers is None or number in self._writers
            return value.detach().clone() if written and not value.requires_grad else value
        return copied(value)


def copied(value: Any) -> Any:
    """Lists, dicts and sets as they are now, with what is in them."""
    if type(value) in (list, tuple):
        return type(value)(value if HOLDING.isdisjoint(map(type, value)) else map(copied, value))
    if type(value) is dict:
        return {key: copied(member) for key, member in value.items()}
    return set(value) if type(value) is set else value
