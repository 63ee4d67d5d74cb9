"""Parameters that a module has in lists, dicts and helpers of its own too, beside its tree.

Techniques put others in the place of a module's parameters: parts between steps, and while a step runs what looks
whole. What somebody took of them before, as for a penalty or an average of weights, follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_parallel.techniques.step import Run, WrappedRun

T = TypeVar("T")

OF_LIBRARIES = {*vars(nn.Module()), *vars(LightningModule())}
LIBRARIES = ("torch", "lightning", "lightning_parallel", "torchmetrics", "builtins", "collections", "transformers")
MOST = 10_000
"""How many members a container has at most that is looked into: longer ones are data."""

Exchanged = Mapping[int, Any]
"""By the `id` of what stands somewhere, what is to stand there."""


class Beside:
    """The places beside the tree of a module in which there are parameters of it.

    Args:
        module: the user's, with all its parameters.

    Attributes:
        attributes: the names under which modules have them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        named = module.named_parameters(remove_duplicate=False)
        self._stand = {name: parameter for name, parameter in named if parameter is not None}
        owners = [(name, module.get_submodule(name.rpartition(".")[0])) for name in self._stand]
        self._in_tree = [(name, name.rpartition(".")[2], owner) for name, owner in owners]
        self._places: list[tuple[dict[str, Any], str]] = []
        self.attributes: set[str] = set()
        self.look()

    def look(self) -> None:
        """Finds the places in which there is now what the tree has."""
        ids, tree = set(map(id, self._stand.values())), {(id(owner), own) for _, own, owner in self._in_tree}
        self._places = [  # what other ranks hold is an attribute of its module, too
            (vars(part), attribute)
            for part in self._module.modules()
            for attribute, value in vars(part).items()
            if attribute not in OF_LIBRARIES and (id(part), attribute) not in tree and _holds(value, ids, set())
        ]
        self.attributes = {attribute for _, attribute in self._places}

    def follow(self) -> Exchanged:
        """Puts there what the tree has now; returns what takes that back."""
        there, back = dict[int, Any](), dict[int, Any]()
        for name, own, owner in self._in_tree:
            before, now = self._stand[name], owner._parameters.get(own, vars(owner).get(own))
            if now is not before and now is not None:
                there[id(before)], back[id(now)], self._stand[name] = now, before, now
        self._exchange(there)
        return back

    @contextmanager
    def shown(self, looks: bool = True) -> Iterator[None]:
        """Inside, what the tree has at the beginning is there too.

        Args:
            looks: whether what somebody takes of that meanwhile follows from then on.
        """
        before = dict(self._stand)
        back = self.follow()
        try:
            yield
        finally:
            if back and looks:
                self.look()
            self._exchange(back)
            self._stand = before

    def run(self, run: Run[T]) -> Run[T]:
        """A step that finds there what it finds in the tree."""
        return _Following(run, self)

    def _exchange(self, exchanged: Exchanged) -> None:
        seen: dict[int, Any] = {}
        for table, attribute in self._places if exchanged else ():
            if attribute in table:
                table[attribute] = _replaced(table[attribute], exchanged, seen)


class _Following(WrappedRun[T]):
    """See `Beside.run`."""

    def __init__(self, inner: Run[T], beside: Beside) -> None:
        super().__init__(inner)
        self._beside = beside

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """See `Run.__call__`."""
        with self._beside.shown(looks=False):  # a step takes parameters anew each time
            return self.inner(*args, **kwargs)


# ---------------------------------------------------------------- within values


def _holds(value: Any, ids: set[int], seen: set[int]) -> bool:
    """Whether a value is one of these, or has one within."""
    if isinstance(value, Tensor):
        return id(value) in ids
    if id(value) in seen:
        return False
    seen.add(id(value))
    return any(_holds(member, ids, seen) for member in _members(value))


def _members(value: Any) -> list[Any]:
    """What a value holds, in an order that `_filled` knows."""
    if isinstance(value, (nn.Module, type, str, bytes)):
        return []
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        return [cell.cell_contents for cell in _cells(value)]
    held = [getattr(value, name) for name in _attributes(value)]
    if isinstance(value, dict) and len(value) <= MOST:
        return [*value, *value.values(), *held]
    if isinstance(value, (list, tuple, deque, set, frozenset)) and len(value) <= MOST:
        return [*value, *held]
    return held


def _attributes(value: Any) -> list[str]:
    """The names of attributes, of an object of a class of the user's, or of who else may keep parameters."""
    if type(value).__module__.partition(".")[0] in LIBRARIES:
        return []
    table = getattr(value, "__dict__", None)
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()) if name != "__dict__"]
    return [*(table if isinstance(table, dict) else ()), *(name for name in slots if _is_set(value, name))]


def _is_set(value: Any, slot: str) -> bool:
    try:
        object.__getattribute__(value, slot)
    except AttributeError:
        return False
    return True


def _cells(function: FunctionType) -> list[Any]:
    if function.__module__ is None or function.__module__.partition(".")[0] in LIBRARIES:
        return []
    return [cell for cell in function.__closure__ or () if cell != type(cell)()]


def _replaced(value: Any, exchanged: Exchanged, seen: dict[int, Any]) -> Any:
    """The value with what is exchanged within; what can be changed stays the same one."""
    if isinstance(value, Tensor):
        return exchanged.get(id(value), value)
    if id(value) not in seen:
        seen[id(value)] = value  # a helper may lead back to itself
        before = _members(value)
        members = [_replaced(member, exchanged, seen) for member in before]
        if any(now is not then for now, then in zip(members, before, strict=True)):
            seen[id(value)] = _filled(value, members)
    return seen[id(value)]


def _filled(value: Any, members: list[Any]) -> Any:
    """The value with other members: the same one, or another one where these cannot be changed."""
    if isinstance(value, MethodType):
        return MethodType(value.__func__, members[0])
    if isinstance(value, partial):
        function, args, more = members[0], members[1 : 1 + len(value.args)], members[1 + len(value.args) :]
        return partial(function, *args, **dict(zip(value.keywords, more, strict=True)))
    if isinstance(value, FunctionType):
        for cell, member in zip(_cells(value), members, strict=True):
            cell.cell_contents = member
        return value
    held = _attributes(value)
    items, more = members[: len(members) - len(held)], members[len(members) - len(held) :]
    value = _with_items(value, items) if items else value
    for name, member in zip(held, more, strict=True):
        object.__setattr__(value, name, member)
    return value


def _with_items(value: Any, items: list[Any]) -> Any:
    if isinstance(value, tuple):
        return tuple.__new__(type(value), items)
    if isinstance(value, frozenset):
        return frozenset.__new__(type(value), items)
    if isinstance(value, dict):
        keys, values = items[: len(value)], items[len(value) :]
        value.clear()
        value.update(zip(keys, values, strict=True))
    elif isinstance(value, (list, deque)):
        for place, member in enumerate(items):
            value[place] = member
    else:
        value.clear()
        value.update(items)
    return value
