"""Snapshots of the plain attributes of modules: what a step changed in them, and how to undo that."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator
from enum import Enum
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_parallel.strategies.lightning_package import LightningModule
from lightning_parallel.values import ATOMS, children_of, map_kind, map_tensors

PLAIN = (*ATOMS, torch.dtype, torch.device)
DEPTH = 4  # containers and objects within each other that are looked into
LARGE = 1000  # entries; a container within another one, or an object, that has more is not looked into
SMALL = 2**16  # elements; a larger tensor that a step changes in place stays changed
FEW = 32  # entries of a list whose tensors a step may change in place


class Attributes:
    """Snapshot of the plain attributes of a module, and of what is in their containers and small objects.

    Args:
        module: the user's, or a part of it. What Lightning and torch keep in attributes is left out.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = vars(module)
        self._before = {name: _Snapshot(value, DEPTH) for name, value in self._users()}

    def _users(self) -> Iterator[tuple[str, Any]]:
        others = _names_of_lightning()
        for name, value in self._attributes.items():
            if name not in others and not name.startswith("_lightning_parallel"):
                yield name, value

    def undo(self) -> None:
        """Put everything back: the same objects, with the same entries."""
        for name in [name for name, _ in self._users() if name not in self._before]:
            del self._attributes[name]
        for name, before in self._before.items():
            before.undo()
            self._attributes[name] = before.value

    def changes(self) -> tuple[dict[str, Change], list[str]]:
        """Return the changes since that other ranks can repeat, and the names of attributes changed in other ways."""
        found: dict[str, Change] = {}
        now = dict(self._users())
        others = [name for name in self._before if name not in now]
        for name, value in now.items():
            before = self._before.get(name)
            if before is None or before.value is not value:
                if before is not None and _is(before.value, value):
                    continue
                change: Change | None = Change(value)
            else:
                change = before.list_change() if isinstance(value, (list, deque)) else None
                if change is None and not before.is_changed():
                    continue
                change = Change(value) if before.is_array else change
            if change is not None and _can_be_sent(change.value):
                found[name] = change
            else:
                others.append(name)
        return found, others


class Change:
    """A change of an attribute.

    Args:
        value: what the attribute is now, or the items that were appended to it.
        appends: whether they were.
    """

    def __init__(self, value: Any, appends: bool = False) -> None:
        self.value, self.appends = value, appends

    def packed(self) -> Change:
        """Return the change with its tensors on the host, detached."""
        return Change(map_tensors(_Packed, self.value), self.appends)

    def repeat(self, module: nn.Module, name: str, device: torch.device) -> None:
        """Make a packed change to the module of another rank.

        Args:
            module: the user's.
            name: of the attribute.
            device: for tensors that were on the device of the rank that packed them.
        """
        value = map_kind(_Packed, lambda each: each.tensor if each.on_host else each.tensor.to(device), self.value)
        if self.appends:
            vars(module)[name].extend(value)
        else:
            vars(module)[name] = value


class _Packed:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.on_host = tensor.detach().cpu(), tensor.device.type == "cpu"


class _Snapshot:
    """A value as it is: of a container its entries, of a tensor its version, of a small one a copy too.

    Args:
        value: any.
        depth: how many containers within each other are looked into.
        copies: whether a tensor is copied.
    """

    def __init__(self, value: Any, depth: int, copies: bool = True) -> None:
        self.value, self.is_array = value, isinstance(value, np.ndarray) or type(value) is Tensor
        self._version, self._copy = _version(value), None  # type: int, Any
        self.entries = None if self.is_array or isinstance(value, PLAIN) or not depth else _entries(value)
        self._inner: list[_Snapshot] = []
        if isinstance(value, np.ndarray):
            self._copy = value.copy()
        elif self.is_array and copies and not value.is_meta and value.numel() <= SMALL:
            self._copy = value.detach().clone()
        if self.entries is None:
            return
        if len(self.entries) <= LARGE:
            copies = not isinstance(value, (list, deque)) or len(self.entries) <= FEW
            found = [
                _Snapshot(each, depth - 1, copies) for each in self.entries.values() if not isinstance(each, PLAIN)
            ]
            self._inner = [each for each in found if each.is_array or each.entries is not None]
        elif depth < DEPTH:
            self.entries = None

    def is_changed(self) -> bool:
        """Whether the value, or something in it, is not as it was."""
        value = self.value
        if isinstance(value, np.ndarray):
            return not np.array_equal(value, self._copy, equal_nan=value.dtype.kind in "fc")
        if self.entries is None:
            return _version(value) != self._version
        now = _entries(value) or {}
        same = now.keys() == self.entries.keys() and all(_is(each, now[key]) for key, each in self.entries.items())
        return not same or any(each.is_changed() for each in self._inner)

    def list_change(self) -> Change | None:
        """The change of a list whose items are as they were but for some at its end; None for no such change."""
        if self.entries is None or any(each.is_changed() for each in self._inner):
            return None
        before, now = list(self.entries.values()), list(self.value)
        if len(now) < len(before) or not all(map(_is, before, now)):
            return Change(self.value)
        return Change(now[len(before) :], appends=True) if len(now) > len(before) else None

    def undo(self) -> None:
        """Put the value back as it was."""
        for each in self._inner:
            each.undo()
        if not self.is_changed():
            return
        if self.entries is None:
            if self._copy is not None:
                with torch.no_grad():
                    self.value[...] = self._copy
            return
        table = self.value if isinstance(self.value, (list, deque, dict, set)) else vars(self.value)
        table.clear()
        if isinstance(table, (list, deque)):
            table.extend(self.entries.values())
        else:
            table.update(self.entries)


def _entries(value: Any) -> dict[Any, Any] | None:
    """The entries of a container by key or place, or the attributes of a plain object, as a meter; None of others."""
    if isinstance(value, (list, deque)):
        return dict(enumerate(value))
    if isinstance(value, (dict, set)):
        return dict(value) if isinstance(value, dict) else dict.fromkeys(value)
    if isinstance(value, (nn.Module, Tensor, type, ModuleType, Enum)) or callable(value):
        return None
    attributes = getattr(value, "__dict__", None)
    return dict(attributes) if isinstance(attributes, dict) else None


def _is(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and bool(one == other))


def _version(value: Any) -> int:
    return value._version if type(value) is Tensor and not value.is_inference() else 0


def _can_be_sent(value: Any) -> bool:
    """Whether another rank can have such a value."""
    if isinstance(value, (Tensor, np.ndarray, np.generic, *PLAIN)):
        return True
    if children := children_of(value):
        return all(map(_can_be_sent, children))
    try:
        return len(pickle.dumps(value)) < SMALL
    except Exception:  # whatever its class raises
        return False


@cache
def _names_of_lightning() -> frozenset[str]:
    return frozenset(vars(LightningModule())) | {"log", "training"}
