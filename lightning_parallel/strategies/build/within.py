"""What lies within a value of the user's, in lists, dicts, functions and objects: tensors, and what names them.

A tensor is named by its `id`, too, as in `set(map(id, parameters))`, by which many tell parameters apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.values import ATOMS, LEAVES

LIBRARIES = ("_thread", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_parallel",
             "torchmetrics", "builtins", "collections", "transformers")  # fmt: skip
MOST = 10_000
"""How many members a container has at most that is looked into: longer ones are data."""

MOST_WITHIN = 100_000
"""How many members there are at most within an attribute, at any depth: one with more is data."""

Exchanged = Mapping[int, Any]
"""By the `id` of what stands somewhere, what is to stand there."""


def holds(value: Any, ids: set[int], without: dict[int, Any]) -> bool | None:
    """Whether a value is one of these, or has one or its `id` within; None where there is too much to look at all.

    Args:
        value: of an attribute.
        ids: of tensors.
        without: by their `id`, objects that hold none; others are added.
    """
    if isinstance(value, ATOMS):
        return type(value) is int and value in ids
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
            if any(type(member) is int and member in ids for member in within):
                return True
            ahead.extend(member for member in within if not isinstance(member, ATOMS))
    without.update(seen)
    return False


def _members(value: Any) -> list[Any]:
    """What a value holds, in an order that `_filled` knows."""
    if isinstance(value, (nn.Module, Optimizer, type, str, bytes)):
        return []
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        return _of_function(value)
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


def _of_function(function: FunctionType) -> list[Any]:
    """What a function of the user's keeps: in its closure, for arguments that it is not given, and as attributes."""
    if function.__module__ is None or function.__module__.partition(".")[0] in LIBRARIES:
        return []
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [*(cell.cell_contents for cell in _cells(function)), *defaults, *vars(function).values()]


def _cells(function: FunctionType) -> list[Any]:
    return [cell for cell in function.__closure__ or () if cell != type(cell)()]


def _fill_function(function: FunctionType, members: list[Any]) -> None:
    ahead = iter(members)
    for cell in _cells(function):
        cell.cell_contents = next(ahead)
    function.__defaults__ = tuple([next(ahead) for _ in function.__defaults__ or ()]) or None
    function.__kwdefaults__ = {name: next(ahead) for name in function.__kwdefaults__ or {}} or None
    vars(function).update({name: next(ahead) for name in vars(function)})


def replaced(value: Any, exchanged: Exchanged, seen: dict[int, tuple[Any, Any]]) -> Any:
    """The value with what is exchanged within, and its `id`s; what can be changed stays the same one.

    Args:
        value: of an attribute.
        exchanged: see there.
        seen: by their `id`, objects and what stands for them; others are added.
    """

    def now(member: Any) -> Any:
        if isinstance(member, Tensor):
            return exchanged.get(id(member), member)
        if type(member) is int:
            return id(exchanged[member]) if member in exchanged else member
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
        _fill_function(value, members)
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
