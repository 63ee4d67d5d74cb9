"""What a step keeps in plain attributes of its module, as lists of outputs for the end of an epoch.

A step that runs in parts, on several ranks, keeps its values once: `KeptValues` takes back what a part kept, and
`merged` puts together what all parts kept, for every rank to `keep`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_parallel.techniques.tools.microbatches import merge, weighted_mean
from lightning_parallel.values import children_of, map_leaves

Path = tuple[Any, ...]
"""The name of an attribute, and the keys of the dicts in it."""

PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
SMALL = 2**16  # elements; a step that changes a larger tensor in place changes it for good, on its rank

LARGE_TABLE = 1000  # entries of a dict; a table of tokens would take long to look through in every part


@dataclass(frozen=True)
class Change:
    """What a step did to a value.

    Attributes:
        value: what it is now; of a list that grew, only what was added.
        before: what a number or a tensor was.
        grew: whether a list grew.
    """

    value: Any
    before: Any = None
    grew: bool = False


class KeptValues:
    """Remembers the plain attributes of a module.

    Args:
        module: the user's.
    """

    def __init__(self, module: LightningModule) -> None:
        self._attributes = vars(module)
        self._before = {name: _copied(value) for name, value in self._plain()}
        self._stay: set[Path] = set()  # changes that cannot be sent

    def _plain(self) -> Iterator[tuple[str, Any]]:
        """Objects of other kinds, and large tables, stay as a part leaves them, on its rank."""
        attributes = list(self._attributes.items())
        return ((name, value) for name, value in attributes if name not in _lightnings_own() and _is_watched(value))

    def changes(self) -> dict[Path, Change]:
        """What has changed since."""
        found: dict[Path, Change] = {}
        for name, value in self._plain():
            _compare((name,), self._before.get(name), value, found)
        self._stay = {path for path, change in found.items() if not _can_be_sent(change.value)}
        return {path: change for path, change in found.items() if path not in self._stay}

    def undo(self) -> None:
        """Puts everything back, in the same lists and dicts."""
        _put_back((), self._before, self._attributes, self._stay)


@cache
def _lightnings_own() -> frozenset[str]:
    return frozenset(vars(LightningModule())) | {"log", "training"}


@dataclass(frozen=True)
class _Held:
    """A tensor as it was: a step may put another one in its place, or change it."""

    tensor: Tensor
    version: int
    copy: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Held:
        return cls(tensor, _version(tensor), tensor.clone() if tensor.numel() <= SMALL else tensor)

    def changed(self, now: Any) -> bool:
        return now is not self.tensor or _version(now) != self.version

    def restored(self) -> Tensor:
        if _version(self.tensor) != self.version:
            with torch.no_grad():
                self.tensor.copy_(self.copy)
        return self.tensor


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class _Lists:
    """A list of lists or dicts, as of one for each loader."""

    items: list[Any]
    copies: list[Any]


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if _is_nested(value):
        return _Lists(list(value), [_copied(item) for item in value])
    if type(value) is list:
        return list(value)
    return _Held.of(value) if isinstance(value, Tensor) else value


def _is_nested(value: Any) -> bool:
    return type(value) is list and 0 < len(value) <= LARGE_TABLE and isinstance(value[0], (list, dict))


def _compare(path: Path, before: Any, now: Any, found: dict[Path, Change]) -> None:
    if isinstance(now, dict) and (isinstance(before, dict) or before is None):
        for key, item in now.items():
            _compare((*path, key), (before or {}).get(key), item, found)
    elif isinstance(before, _Lists) and type(now) is list and len(now) == len(before.copies):
        for number, (old, item) in enumerate(zip(before.copies, now, strict=True)):
            _compare((*path, number), old, item, found)
    elif type(now) is list and (type(before) is list or before is None):
        _compare_lists(path, before or [], now, found)
    elif _changed(before, now):
        found[path] = Change(now.clone() if isinstance(now, Tensor) else now, before)


def _compare_lists(path: Path, before: list[Any], now: list[Any], found: dict[Path, Change]) -> None:
    try:
        begins_alike = now[: len(before)] == before  # which looks at identity first, so tensors are not compared
    except (RuntimeError, ValueError, TypeError):  # unless another one is in the place of one
        begins_alike = False
    if not begins_alike:
        found[path] = Change(list(now))
    elif len(now) > len(before):
        found[path] = Change(now[len(before) :], grew=True)


def _changed(before: Any, now: Any) -> bool:
    if isinstance(before, _Held):
        return before.changed(now)
    return before is not now and (type(before) is not type(now) or not isinstance(now, PLAIN) or before != now)


def _put_back(path: Path, before: dict[Any, Any], held: dict[Any, Any], stay: Collection[Path]) -> None:
    """Gives what is watched in a dict its earlier values."""
    for key in [key for key, value in held.items() if key not in before and _may_change(path, key, value)]:
        if (*path, key) not in stay:
            del held[key]
    for key, old in before.items():
        if (*path, key) not in stay and (key not in held or _is_watched(held[key])):
            held[key] = _earlier((*path, key), old, held.get(key), stay)


def _may_change(path: Path, key: Any, value: Any) -> bool:
    return bool(path) or (key not in _lightnings_own() and _is_watched(value))


def _earlier(path: Path, before: Any, now: Any, stay: Collection[Path]) -> Any:
    """A value as it was, in the same list or dict."""
    if isinstance(before, dict) and isinstance(now, dict):
        _put_back(path, before, now, stay)
        return now
    if isinstance(before, _Lists):
        for number, copy in enumerate(before.copies):
            before.items[number] = _earlier((*path, number), copy, before.items[number], stay)
        before = before.items
    if type(before) is list and type(now) is list:
        now[:] = before
        return now
    return before.restored() if isinstance(before, _Held) else before


def _is_watched(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) <= LARGE_TABLE
    return type(value) is list or isinstance(value, (Tensor, tuple, *PLAIN))


def _can_be_sent(value: Any) -> bool:
    children = children_of(value)
    return all(map(_can_be_sent, children)) if children else isinstance(value, (Tensor, dict, list, tuple, *PLAIN))


# ---------------------------------------------------------------- all parts of a batch


class _Sent:
    """A tensor on its way, and whether it was on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.on_host = tensor.cpu(), tensor.device.type == "cpu"


def merged(changes: Sequence[dict[Path, Change]], sizes: Sequence[int]) -> dict[Path, Change]:
    """What the step would have kept for the whole batch.

    Args:
        changes: those of each part, each from the same state.
        sizes: how many samples each part has.
    """
    paths = dict.fromkeys(path for some in changes for path in some)
    return {path: _merged([c[path] for c in changes if path in c], sizes) for path in paths}


def _merged(changes: Sequence[Change], sizes: Sequence[int]) -> Change:
    values = [map_leaves(_detached, change.value) for change in changes]
    first = changes[0]
    if len(values) < len(sizes):  # only some parts did it
        merged = [item for items in values for item in items] if first.grew else values[-1]
    elif first.grew:
        merged = _items(values, sizes)
    elif type(first.value) is int and type(first.before) is int:
        merged = first.before + _count([change.value - change.before for change in changes])
    elif isinstance(first.before, _Held) and all(_like(value, first.before) for value in values):
        merged = _of_one_shape(first.before.copy, values, sizes)
    else:
        merged = merge(values, sizes)
    return Change(map_leaves(_to_host, merged), grew=first.grew)


def _like(value: Any, held: _Held) -> bool:
    return isinstance(value, Tensor) and value.shape == held.tensor.shape and value.dtype == held.tensor.dtype


def _of_one_shape(before: Tensor, values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """A state of the user's: its counts add up, its other values are averaged."""
    if before.is_floating_point() or before.is_complex():
        return weighted_mean(values, sizes)
    return before + sum(value - before for value in values) if before.dtype != torch.bool else values[-1]


def _items(values: Sequence[list[Any]], sizes: Sequence[int]) -> list[Any]:
    """One item for the batch, or one for each sample: where each part has one, means and tensors are for the batch."""
    counts = [len(items) for items in values]
    everything = [item for items in values for item in items]
    of_samples = counts == list(sizes) and (
        max(counts) > 1 or not any(isinstance(i, (float, Tensor)) for i in everything)
    )
    if len(set(counts)) > 1 or of_samples:
        return everything
    return [_item(same, sizes) for same in zip(*values, strict=True)]


def _item(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    counts = all(type(value) is int for value in values) and len(set(values)) > 1
    return sum(values) if counts else merge(values, sizes)


def _count(increments: Sequence[int]) -> int:
    """Steps are counted once, samples add up: what always grew by one counts steps."""
    return 1 if set(increments) == {1} else sum(increments)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _to_host(value: Any) -> Any:
    return _Sent(value) if isinstance(value, Tensor) else value


def keep(module: LightningModule, changes: dict[Path, Change]) -> None:
    """Does to the module what the step did to it, perhaps on another rank."""

    def arrived(value: Any) -> Any:
        if isinstance(value, _Sent):
            return value.tensor if value.on_host else value.tensor.to(module.device)
        return value

    for (*way, last), change in changes.items():
        held: Any = vars(module)
        for key in way:
            held = _entry(held, key, {})
        value = map_leaves(arrived, change.value)
        if change.grew:
            _entry(held, last, []).extend(value)
        else:
            held[last] = value


def _entry(held: Any, key: Any, new: Any) -> Any:
    return held[key] if isinstance(held, list) else held.setdefault(key, new)
