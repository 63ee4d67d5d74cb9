"""What a block writes to its modules and inputs, which a recomputation finds as the forward did, and does not write.

Running statistics, counters, numbers of tokens by expert, a loss that is kept in an attribute for the step to read: a
block that is not recomputed reads and writes them once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from lightning_parallel.collectives.made_of import version
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.tools.shards import local
from lightning_parallel.values import tensors_of

T = TypeVar("T")

OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes in which modules keep their parts, and hooks."""
WATCHED = (bool, int, float, complex, str, type(None), tuple, list, dict, set, Tensor)
"""What may be put back. Modules, functions and other objects stay as they are: nobody knows what is in them."""
HOLDING = frozenset((list, tuple, dict, set))
"""What is copied with what is in it; a block may keep long lists of anything else, which are copied at once."""
ABSENT = object()
_not_compiled: Callable[[T], T] = cast(Any, torch.compiler.disable)
"""What runs behind the break of a graph would be compiled, too."""

Place = tuple[dict[str, Any], str, int]
"""The attributes or the buffers of a module, a key among them, and the number of the module."""
Before = list[tuple[Place, Any]]
"""What modules held at their places."""
Values = list[tuple[dict[str, Any], str, Tensor]]
"""Copies of parameters, with the table and the name of each."""


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
        self._slots = [(part._parameters, name) for _, part in parts for name in part._parameters]
        """Of the parameters that the block may write, those of all modules before its first forward."""

    def before(self) -> Before:
        """What the modules hold now: copies of what the block may write to."""
        return [(place, self._kept(table.get(key), number)) for place in self._now() for table, key, number in (place,)]

    def values(self) -> Values:
        """Copies of the parameters that the block may write.

        Before its first forward these are all. As soon as that has run, `written` leaves few of them, mostly none.
        """
        return [(table, name, _memory(table[name]).clone()) for table, name in self._slots if table[name] is not None]

    def written(self, before: Values) -> Values:
        """Those of them that the first forward has written; later ones are taken to write no others."""
        with _disable_current_modes():
            found = [each for each in before if not torch.equal(each[2], _memory(each[0][each[1]]))]
        self._slots = [(table, name) for table, name, _ in found]
        return found

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


@contextmanager
def holding(values: Values) -> Iterator[None]:
    """Inside, parameters hold these values; afterwards what they hold now."""
    with _disable_current_modes():
        now = [(table, name, _memory(table[name]).clone()) for table, name, _ in values]
        _fill(values)
    try:
        yield
    finally:
        with _disable_current_modes():
            _fill(now)


def _fill(values: Values) -> None:
    for table, name, value in values:
        _memory(table[name]).copy_(value)


def _memory(parameter: Any) -> Tensor:
    """What a rank has of a parameter, of which copies and writes count as no versions."""
    return _own(parameter).data


def _own(tensor: Any) -> Tensor:
    own: Tensor = tensor.own if isinstance(tensor, Divided) else local(tensor)
    return own


class Inputs:
    """Keeps for recomputations what a block is given: its first forward tells whether it writes to tensors of that."""

    def __init__(self) -> None:
        self._may_be_written = True

    def kept(self, given: Any) -> Any:
        """Lists, dicts and sets as they are now, with copies of tensors if the block may write to them."""
        return _with_copies(copied(given)) if self._may_be_written else copied(given)

    def versions(self, given: Any) -> list[tuple[Tensor, Any]]:
        """The tensors of which a block may write to some, as they are before its forward."""
        return _versions(given) if self._may_be_written else []

    def learn(self, before: list[tuple[Tensor, Any]]) -> None:
        """The forward has run; these were the versions before it."""
        self._may_be_written = any(version(own) != then for own, then in before)


@_not_compiled
def _versions(given: Any) -> list[tuple[Tensor, Any]]:
    return [(own, version(own)) for own in map(_own, tensors_of(given))]


@_not_compiled
def _with_copies(given: Any) -> Any:
    copies: dict[int, Tensor] = {}  # what is given twice, as queries and keys are, stays one tensor
    with _disable_current_modes():  # what selective checkpointing remembers is of the forward alone
        for each in tensors_of(given):
            copies[id(each)] = each if isinstance(each, nn.Parameter) else each.clone()
    return tree_map_only(Tensor, lambda each: copies.get(id(each), each), given)


def copied(value: Any) -> Any:
    """Lists, dicts and sets as they are now, with what is in them."""
    if type(value) in (list, tuple):
        return type(value)(value if HOLDING.isdisjoint(map(type, value)) else map(copied, value))
    if type(value) is dict:
        return {key: copied(member) for key, member in value.items()}
    return set(value) if type(value) is set else value
