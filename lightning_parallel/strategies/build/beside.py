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
from lightning_parallel.techniques.tools.telling import warn
from lightning_parallel.values import ATOMS, LEAVES

T = TypeVar("T")

OF_LIBRARIES = {*vars(nn.Module()), *vars(LightningModule())}
LIBRARIES = ("torch", "lightning", "lightning_parallel", "torchmetrics", "builtins", "collections", "transformers")
MOST = 10_000
"""How many members a container has at most that is looked into: longer ones are data."""

MOST_WITHIN = 100_000
"""How many members there are at most within an attribute, at any depth: one with more is data."""

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
        self._data, self._told = set[str](), set[str]()
        self.attributes: set[str] = set()
        self.look()

    def look(self) -> None:
        """Finds the places in which there is now what the tree has."""
        ids, tree = set(map(id, self._stand.values())), {(id(owner), own) for _, own, owner in self._in_tree}
        self._places, without = [], dict[int, Any]()
        for path, part in self._module.named_modules():
            for attribute, value in vars(part).items():
                if isinstance(value, ATOMS) or attribute in OF_LIBRARIES:
                    continue
                if (id(part), attribute) in tree:  # what other ranks hold is an attribute of its module, too
                    continue
                holds = _holds(value, ids, without)
                if holds is None:
                    self._data.add(f"{path}.{attribute}".removeprefix("."))
                elif holds:
                    self._places.append((vars(part), attribute))
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
    def shown(self) -> Iterator[None]:
        """Inside, what the tree has at the beginning is there too; of what somebody takes meanwhile `look` knows."""
        before = dict(self._stand)
        back = self.follow()
        try:
            yield
        finally:
            self._exchange(back)
            self._stand = before

    def run(self, run: Run[T]) -> Run[T]:
        """A step that finds there what it finds in the tree."""
        return _Following(run, self)

    def _exchange(self, exchanged: Exchanged) -> None:
        seen: dict[int, tuple[Any, Any]] = {}
        for table, attribute in self._places if exchanged else ():
            if attribute in table:
                table[attribute] = _replaced(table[attribute], exchanged, seen)
        if exchanged:
            self._tell_of_data()

    def _tell_of_data(self) -> None:
        untold, self._told = self._data - self._told, {*self._data}
        if untold:
            warn(
                f"{', '.join(sorted(untold))} of the module: there are more than {MOST_WITHIN:,} objects within, so it "
                "counts as data, and parameters that are kept in it do not follow what ranks compute with; keep "
                "parameters in an attribute of their own"
            )


class _Following(WrappedRun[T]):
    """See `Beside.run`."""

    def __init__(self, inner: Run[T], beside: Beside) -> None:
        super().__init__(inner)
        self._beside = beside

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """See `Run.__call__`."""
        with self._beside.shown():  # a step takes parameters anew each time
            return self.inner(*args, **kwargs)


# ---------------------------------------------------------------- within values


def _holds(value: Any, ids: set[int], without: dict[int, Any]) -> bool | None:
    """Whether a value is one of these, or has one within; None where there is too much within to look at all.

    Args:
        value: of an attribute.
        ids: of tensors.
        without: by their `id`, objects that hold none; others are added.
    """
    seen, ahead, members = dict[int, Any](), deque([value]), 0
    while ahead:
        each = ahead.popleft()  # what is near comes first
        if isinstance(each, Tensor):
            if id(each) in ids:
                return True
        elif id(each) not in seen and id(each) not in without:
            seen[id(each)] = each
            within = _members(each)
            members += len(within)
            if members > MOST_WITHIN:
                return None
            ahead.extend(member for member in within if not isinstance(member, ATOMS))
    without.update(seen)
    return False


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


def _replaced(value: Any, exchanged: Exchanged, seen: dict[int, tuple[Any, Any]]) -> Any:
    """The value with what is exchanged within; what can be changed stays the same one.

    Args:
        value: of an attribute.
        exchanged: see there.
        seen: by their `id`, objects and what stands for them; others are added.
    """

    def now(member: Any) -> Any:
        if isinstance(member, Tensor):
            return exchanged.get(id(member), member)
        return seen.get(id(member), (None, member))[1]

    for each, before in _containers(value, seen):
        members = [*map(now, before)]
        if any(one is not other for one, other in zip(members, before, strict=True)):
            seen[id(each)] = each, _filled(each, members)
    return now(value)


def _containers(value: Any, seen: dict[int, tuple[Any, Any]]) -> Iterator[tuple[Any, list[Any]]]:
    """A value and all within that holds something, with its members: each once, and behind those within it."""
    ahead: list[tuple[Any, list[Any] | None]] = [(value, None)]
    while ahead:
        each, members = ahead.pop()
        if members is not None:
            yield each, members
        elif id(each) not in seen and not isinstance(each, Tensor):
            seen[id(each)] = each, each  # it may lead back to itself
            members = _members(each)
            ahead.append((each, members))
            ahead.extend((member, None) for member in members if not isinstance(member, LEAVES))


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
