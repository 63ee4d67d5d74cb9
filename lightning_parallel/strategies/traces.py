"""What a step leaves in a module: undone where it only is analyzed or measured, sent to other ranks in a pipeline."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies.data.randomness import RandomState
from lightning_parallel.strategies.lightning_package import (
    DummyLogger,
    LightningModule,
    MisconfigurationException,
    _Metadata,
)
from lightning_parallel.techniques.pipeline_parallel.rng import own_generators
from lightning_parallel.techniques.pipeline_parallel.trace import UnsupportedStepError
from lightning_parallel.values import ATOMS, children_of, map_kind, map_tensors, tensors_of

PLAIN = (*ATOMS, torch.dtype, torch.device)
DEPTH = 4  # containers and objects within each other that are looked into
LARGE = 1000  # entries; a container within another one, or an object, that has more is not looked into
SMALL = 2**16  # elements; a larger tensor that a step changes in place stays changed
FEW = 32  # entries of a list whose tensors a step may change in place
HOST = torch.device("cpu")
HOOKS = [name for name, table in vars(nn.Module()).items() if "hook" in name and isinstance(table, dict)]
"""The attributes of modules that have their hooks."""
NOT_USERS = frozenset(vars(LightningModule())) | {"log", "training"}
"""The attributes that Lightning and torch keep in a module."""


# ---------------------------------------------------------------- attributes


class Attributes:
    """Snapshot of the plain attributes of a module, and of what is in their containers and small objects.

    Args:
        module: the user's, or a part of it. What Lightning and torch keep in attributes is left out.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = vars(module)
        self._before = self._now()
        self._held = {name: [*_held_in(value, DEPTH)] for name, value in self._before.items()}

    def _now(self) -> dict[str, Any]:
        users = (name for name in self._attributes if name not in NOT_USERS)
        return {name: self._attributes[name] for name in users if not name.startswith("_lightning_parallel")}

    def undo(self) -> None:
        """Put everything back: the same objects, with the same entries."""
        for name in self._now().keys() - self._before.keys():
            del self._attributes[name]
        for name, value in self._before.items():
            for each in self._held[name]:
                each.undo()
            self._attributes[name] = value

    def changes(self) -> tuple[dict[str, Change], list[str]]:
        """Return the changes since that other ranks can repeat, and the names of attributes changed in other ways."""
        found: dict[str, Change] = {}
        now = self._now()
        others = [name for name in self._before if name not in now]
        for name, value in now.items():
            held = self._held.get(name, [])
            if name not in self._before or self._before[name] is not value:
                if name in self._before and _is(self._before[name], value):
                    continue
                change: Change | None = Change(value)
            elif not any(each.is_changed() for each in held):
                continue
            elif isinstance(value, (list, deque)) and not any(each.is_changed() for each in held[1:]):
                before, items = list(held[0].before.values()), list(value)
                appends = len(items) > len(before) and all(map(_is, before, items))
                change = Change(items[len(before) :] if appends else value, appends)
            else:
                change = Change(value) if _is_array(value) else None
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


class _Held(NamedTuple):
    """Something that a step may change in place, as it was.

    Attributes:
        value: a container, an object or an array.
        before: its entries, or a copy; None of a larger tensor.
        version: of a tensor.
    """

    value: Any
    before: Any
    version: int = 0

    def is_changed(self) -> bool:
        value, before = self.value, self.before
        if isinstance(value, np.ndarray):
            return not np.array_equal(value, before, equal_nan=value.dtype.kind in "fc")
        if _is_array(value):
            return _version(value) != self.version
        now = _entries(value) or {}
        return now.keys() != before.keys() or not all(_is(each, now[key]) for key, each in before.items())

    def undo(self) -> None:
        value, before = self.value, self.before
        if before is None or not self.is_changed():
            return
        if _is_array(value):
            with torch.no_grad():
                value[...] = before
            return
        table = value if isinstance(value, (list, deque, dict, set)) else vars(value)
        table.clear()
        if isinstance(table, (list, deque)):
            table.extend(before.values())
        else:
            table.update(before)


def _held_in(value: Any, depth: int, copies: bool = True) -> Iterator[_Held]:
    """The value if a step may change it in place, then what it holds; of tensors copies only where `copies`."""
    if isinstance(value, np.ndarray):
        yield _Held(value, value.copy())
    elif _is_array(value):
        small = copies and not value.is_meta and value.numel() <= SMALL
        yield _Held(value, value.detach().clone() if small else None, _version(value))
    elif not isinstance(value, PLAIN) and depth and (entries := _entries(value)) is not None:
        large = len(entries) > LARGE
        if not large or depth == DEPTH:
            yield _Held(value, entries)
        copies = not isinstance(value, (list, deque)) or len(entries) <= FEW
        for each in () if large else entries.values():
            yield from _held_in(each, depth - 1, copies)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or type(value) is Tensor


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
    return 0 if value.is_inference() else value._version  # inference tensors count none


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


# ---------------------------------------------------------------- steps that leave no trace


@contextmanager
def parts_unchanged(module: LightningModule) -> Iterator[None]:
    """Afterwards the module's parts have the attributes and the hooks that they had."""
    kept = [Attributes(part) for part in module.modules() if part is not module]
    hooks = [part[name] for part in map(vars, module.modules()) for name in HOOKS if name in part]
    before = [dict(table) for table in hooks]
    try:
        yield
    finally:
        for snapshot in kept:
            snapshot.undo()
        for table, entries in zip(hooks, before, strict=True):
            _put_back(table, entries)


@contextmanager
def without_traces(module: LightningModule, device: torch.device = HOST, reads: bool = True) -> Iterator[None]:
    """Inside, nothing is logged and no metric counts; afterwards module, optimizers and schedulers are as they were.

    So are the states of all generators from which the module may draw.

    Args:
        module: the user's.
        device: where the module is.
        reads: whether what is logged or counted is read, so that it is known to be used.
    """
    trainer, kept, drawn = module.trainer, Attributes(module), RandomState.now(device=device)
    read = _read if reads else _zero
    # learning rates
    settings: list[dict[str, Any]] = [group for each in trainer.optimizers for group in each.param_groups]
    settings += [vars(config.scheduler) for config in trainer.lr_scheduler_configs]
    with ExitStack() as back:
        back.callback(drawn.restore, device=device)
        for table in settings:
            back.callback(_put_back, table, dict(table))
        for generator in own_generators(module):
            back.callback(generator.set_state, generator.get_state())
        back.callback(setattr, trainer, "loggers", trainer.loggers)
        trainer.loggers = [DummyLogger() for _ in trainer.loggers]  # for a step that writes to them itself
        for part in module.modules():
            if isinstance(part, (Metric, MetricCollection)):
                back.enter_context(internals.replaced(part, "update", read))
            if isinstance(part, Metric):
                back.enter_context(internals.replaced(part, "forward", read))
                back.enter_context(internals.replaced(part, "compute", _zero))
        back.enter_context(internals.replaced(module, "log", _read_to_log if reads else _zero))
        back.callback(kept.undo)
        yield


def _put_back(table: dict[str, Any], before: dict[str, Any]) -> None:
    table.clear()
    table.update(before)


def _read(*args: Any, **kwargs: Any) -> Tensor:
    """Read values, as what logs or counts them will, so that they are known to be used."""
    for tensor in tensors_of((args, kwargs)):
        torch.equal(tensor, tensor)
    return torch.zeros(())


def _read_to_log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    try:
        if "reduce_fx" in kwargs:  # raises Lightning's own error where it has no such reduction
            _Metadata("training_step", name, reduce_fx=kwargs["reduce_fx"])
    except MisconfigurationException as error:
        raise UnsupportedStepError(str(error)) from None
    _read(value)


def _zero(*_: Any, **__: Any) -> Tensor:
    return torch.zeros(())
