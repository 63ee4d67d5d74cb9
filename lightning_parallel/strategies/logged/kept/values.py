"""Values that a step keeps in plain attributes of its module, as lists of outputs for the end of an epoch.

A step that runs in parts, on several ranks, keeps its values once: `KeptValues` tells what a part kept and takes it
back, `merged` puts together what all parts kept, for every rank to `keep`. Attributes, and what is in their lists,
dicts, sets and small objects, are watched alike; a change has the way to it for its name.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_parallel.strategies.lightning_package import LightningModule
from lightning_parallel.values import children_of, map_leaves

Path = tuple[Any, ...]
"""The name of an attribute, then keys of dicts, places in lists, names of an object's attributes."""

PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
SMALL = 2**16  # elements; a step that changes a larger tensor in place changes it for good, on its rank
LARGE = 1000  # entries; what is in those of a larger container is not looked at, nor is a larger object
FEW = 32  # entries of a list whose tensors a step may change in place


class _Gone(Enum):
    GONE = "an entry that a step took out of a dict"


@dataclass(frozen=True)
class Change:
    """A change that a step made to a value.

    Attributes:
        value: what it is now; of a list or set that grew, only what was added.
        before: what a number or a tensor was.
        grew: whether a list or set grew.
    """

    value: Any
    before: Any = None
    grew: bool = False


@dataclass(frozen=True)
class _Was:
    """A value as it was: of a container its entries and those that may change themselves, of a tensor a copy."""

    value: Any
    entries: Any = None
    inner: dict[Any, _Was] = field(default_factory=dict)
    version: int = 0


class KeptValues:
    """Remembers the plain attributes of a module.

    Args:
        module: the user's, or a part of it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = vars(module)
        users = self._users()
        self._before = _container(None, users, users, None)

    def _users(self) -> dict[Any, Any]:
        others = _lightnings_own()
        return {
            name: value
            for name, value in self._attributes.items()
            if name not in others and not name.startswith("_lightning_parallel")
        }

    def changes(self) -> tuple[dict[Path, Change], set[Path]]:
        """The changes since, and the paths of those that cannot be sent to another rank."""
        found: dict[Path, Change] = {}
        _compare_tables((), self._before, self._users(), found)
        stay = {path for path, change in found.items() if not can_be_sent(change.value)}
        return {path: change for path, change in found.items() if path not in stay}, stay

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that the module keeps."""
        return _tensors_in(self._before)

    def undo(self, stay: Collection[Path] = ()) -> None:
        """Puts everything back, in the same containers, but for the changes that are to `stay`."""
        _restored((), self._before, stay)
        for name in self._users().keys() - self._before.entries.keys():
            if (name,) not in stay:
                del self._attributes[name]
        staying = {name for name, *way in stay if not way}
        self._attributes.update({name: item for name, item in self._before.entries.items() if name not in staying})


@cache
def _lightnings_own() -> frozenset[str]:
    return frozenset(vars(LightningModule())) | {"log", "training"}


# ---------------------------------------------------------------- containers


def table_of(value: Any) -> dict[Any, Any] | None:
    """The entries of a dict, or the attributes of a plain object, as a counter of averages is one."""
    if isinstance(value, dict):
        return value
    machinery = isinstance(value, (nn.Module, Tensor, type, ModuleType, Enum)) or callable(value)
    attributes = None if machinery else getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, deque))


class _Room:
    """The number of entries of an object, and of what is in it, that may still be looked at."""

    def __init__(self) -> None:
        self.left = LARGE

    def take(self, entries: int) -> bool:
        self.left -= entries
        return self.left >= 0


def _remember(value: Any, room: _Room | None = None) -> _Was:
    if isinstance(value, (Tensor, np.ndarray)):
        return _Was(value, _copy_of(value), version=_version(value))
    if isinstance(value, set):
        return _Was(value, set(value))
    if _is_list(value):
        return _container(value, list(value), dict(enumerate(value)) if len(value) <= LARGE else {}, room)
    table = table_of(value)
    if table is None:
        return _Was(value)
    if not isinstance(value, dict):
        room = room or _Room()
        if not room.take(len(table)):
            return _Was(value)
    return _container(value, dict(table), table if len(table) <= LARGE else {}, room)


def _container(value: Any, entries: Any, inner: dict[Any, Any], room: _Room | None) -> _Was:
    if room is not None and not (isinstance(entries, dict) or room.take(len(entries))):
        return _Was(value)
    tensors = (Tensor, np.ndarray) if not _is_list(value) or len(entries) <= FEW else ()
    remembered = {key: _remember(item, room) for key, item in inner.items() if _may_change(item, tensors)}
    if room is not None and room.left < 0:
        return _Was(value)
    return _Was(value, entries, remembered)


def _may_change(value: Any, tensors: tuple[type, ...]) -> bool:
    if isinstance(value, PLAIN):
        return False
    return isinstance(value, (*tensors, list, deque, set, dict)) or table_of(value) is not None


def _copy_of(tensor: Any) -> Any:
    if isinstance(tensor, np.ndarray):
        return tensor.copy() if tensor.size <= SMALL else tensor
    return tensor.detach().clone() if tensor.numel() <= SMALL else tensor


def _version(tensor: Any) -> int:
    return 0 if isinstance(tensor, np.ndarray) or tensor.is_inference() else tensor._version


def _tensors_in(was: _Was) -> Iterator[Tensor]:
    if isinstance(was.value, Tensor):
        yield was.value
    for inner in was.inner.values():
        yield from _tensors_in(inner)


# ---------------------------------------------------------------- what has changed


def _compare_tables(path: Path, was: _Was, now: Mapping[Any, Any], found: dict[Path, Change]) -> None:
    for key, item in now.items():
        before = was.inner.get(key) or (_Was(was.entries[key]) if key in was.entries else None)
        if key in was.inner or before is None or before.value is not item:
            _compare((*path, key), before, item, found)
    found.update({(*path, key): Change(_Gone.GONE) for key in was.entries.keys() - now.keys()})


def _compare(path: Path, was: _Was | None, now: Any, found: dict[Path, Change]) -> None:
    entries = None if was is None else was.entries
    if _is_list(now) and (was is None or isinstance(entries, list)):
        _compare_lists(path, was or _Was([], []), now, found)
    elif isinstance(now, set) and (was is None or isinstance(entries, set)) and now >= (entries or set()):
        if now > (entries or set()):
            found[path] = Change(now - (entries or set()), grew=True)
    elif isinstance(now, dict) and was is None:
        _compare_tables(path, _Was(now, {}), now, found)
    elif was is not None and isinstance(entries, dict) and type(now) is type(was.value):
        _compare_tables(path, was, table_of(now) or {}, found)
    elif was is None or _changed(was, now):
        found[path] = Change(_frozen(now), was and (was.value if was.entries is None else was.entries))


def _compare_lists(path: Path, was: _Was, now: Any, found: dict[Path, Change]) -> None:
    items, size = list(now), len(was.entries)
    if _same(items[:size], was.entries):
        for place, inner in was.inner.items():
            _compare((*path, place), inner, items[place], found)
        if len(items) > size:
            found[path] = Change(_frozen(items[size:]), grew=True)
        return
    kept = next((k for k in range(size - 1, 0, -1) if _same(items[:k], was.entries[-k:])), 0)
    full = isinstance(now, deque) and now.maxlen == len(items)  # it lost its first items to those that were added
    found[path] = Change(_frozen(items[kept if full else 0 :]), grew=full)


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(_is, some, others))


def _is(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and one == other)


def _changed(was: _Was, now: Any) -> bool:
    if isinstance(now, np.ndarray) and now is was.value:
        return not np.array_equal(now, was.entries, equal_nan=now.dtype.kind in "fc")
    if isinstance(now, Tensor) and now is was.value:
        return _version(now) != was.version
    return not _is(was.value, now)


def _frozen(value: Any) -> Any:
    """The value as it is now, whatever is done to its containers and small tensors later."""
    if isinstance(value, set):
        return set(value)
    copied = map_leaves(lambda leaf: _copy_of(leaf) if isinstance(leaf, (Tensor, np.ndarray)) else leaf, value)
    return list(copied) if isinstance(copied, deque) else copied


def _restored(path: Path, was: _Was, stay: Collection[Path]) -> Any:
    """The value as it was: the same object, with the same entries."""
    value, entries = was.value, was.entries
    for key, inner in was.inner.items():
        if (*path, key) not in stay:
            _restored((*path, key), inner, stay)
    if isinstance(value, (Tensor, np.ndarray)):
        _refill(value, was)
    elif isinstance(entries, list) and not _same(list(value), entries):
        value.clear()
        value.extend(entries)
    elif isinstance(entries, set):
        value.clear()
        value.update(entries)
    elif isinstance(entries, dict) and path:
        _put_back(path, table_of(value) or {}, entries, stay)
    return value


def _refill(value: Any, was: _Was) -> None:
    if isinstance(value, np.ndarray) and was.entries is not value:
        value[...] = was.entries
    elif isinstance(value, Tensor) and _version(value) != was.version:
        with torch.no_grad():
            value.copy_(was.entries)


def _put_back(path: Path, table: dict[Any, Any], entries: dict[Any, Any], stay: Collection[Path]) -> None:
    if not _same([*table, *table.values()], [*entries, *entries.values()]):
        staying = {key: item for key, item in table.items() if (*path, key) in stay}
        table.clear()
        table.update({**entries, **staying})


# ---------------------------------------------------------------- on every rank


class Sent:
    """A tensor on its way, and whether it was on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.on_host = tensor.detach().cpu(), tensor.device.type == "cpu"


def can_be_sent(value: Any) -> bool:
    """Whether another rank can have such a value."""
    children = children_of(value)
    if children or isinstance(value, (Tensor, np.ndarray, np.generic, *PLAIN)):
        return all(map(can_be_sent, children))
    try:
        return len(pickle.dumps(value)) < SMALL
    except Exception:  # whatever its class raises
        return False


def keep(module: LightningModule, changes: Mapping[Path, Change]) -> None:
    """Does to the module what the step did to it, perhaps on another rank."""

    def arrived(value: Any) -> Any:
        if isinstance(value, Sent):
            return value.tensor if value.on_host else value.tensor.to(module.device)
        return value

    for (*way, last), change in changes.items():
        _do(_holder(vars(module), way), last, change, map_leaves(arrived, change.value))


def _holder(held: Any, way: list[Any]) -> Any:
    for key in way:
        inside = held[key] if _is_list(held) else held.setdefault(key, {})
        table = table_of(inside)
        held = inside if table is None else table
    return held


def _do(held: Any, key: Any, change: Change, value: Any) -> None:
    if change.value is _Gone.GONE:
        held.pop(key, None)
    elif isinstance(change.value, set) and change.grew:
        held.setdefault(key, set()).update(value)
    elif change.grew:
        (held[key] if _is_list(held) else held.setdefault(key, [])).extend(value)
    else:
        _put(held, key, value)


def _put(held: Any, key: Any, value: Any) -> None:
    before = held[key] if _is_list(held) else held.get(key)
    if isinstance(before, deque):
        before.clear()
        before.extend(value)
    else:
        held[key] = value


def names_of(paths: Collection[Path]) -> Iterator[str]:
    """The ways to values as a user writes them."""
    for name, *way in paths:
        yield f"self.{name}" + "".join(f"[{key!r}]" for key in way)
