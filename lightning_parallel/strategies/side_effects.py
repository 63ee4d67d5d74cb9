"""Side effects of a step on the module: undone after analyzing or measuring it, sent to other ranks in a pipeline."""

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
from lightning_parallel.techniques.pipeline_parallel.rng import generators_of_modules
from lightning_parallel.techniques.pipeline_parallel.trace import UnsupportedStepError
from lightning_parallel.values import ATOMS, children_of, map_kind, map_tensors, tensors_of

PLAIN = (*ATOMS, torch.dtype, torch.device)
DEPTH = 4  # levels of nested containers and objects that a snapshot covers
LARGE = 1000  # entries; of a larger container or object only the entries are recorded, and nothing if it is nested
SMALL = 2**16  # elements; changes in place of larger tensors are not undone
FEW = 32  # entries; tensors in longer lists are not copied, so changes of them in place are not undone
HOST = torch.device("cpu")
HOOKS = [name for name, table in vars(nn.Module()).items() if "hook" in name and isinstance(table, dict)]
"""Names of the attributes in which modules hold their hooks."""
NOT_USERS = frozenset(vars(LightningModule())) | {"log", "training"}
"""Names of the attributes that Lightning and torch set on a module."""


# ---------------------------------------------------------------- attributes


class Attributes:
    """Snapshot of a module's attributes and of the contents of containers, objects and small tensors in them.

    Args:
        module: the user's module or a submodule. Attributes that Lightning and torch set are left out.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = vars(module)
        self._before = self._now()
        self._held = {name: [*_snapshots_of(value, DEPTH)] for name, value in self._before.items()}

    def _now(self) -> dict[str, Any]:
        users = (name for name in self._attributes if name not in NOT_USERS)
        return {name: self._attributes[name] for name in users if not name.startswith("_lightning_parallel")}

    def undo(self) -> None:
        """Restore all attributes: the same objects, with the same entries."""
        for name in self._now().keys() - self._before.keys():
            del self._attributes[name]
        for name, value in self._before.items():
            for snapshot in self._held[name]:
                snapshot.undo()
            self._attributes[name] = value

    def changes(self) -> tuple[dict[str, Change], list[str]]:
        """Return the changes that other ranks can repeat, by attribute, and the names of all other changed ones.

        Other ranks can repeat new values that can be pickled, lists with other items, and arrays changed in place.
        """
        repeatable: dict[str, Change] = {}
        now = self._now()
        others = [name for name in self._before if name not in now]
        for name, value in now.items():
            snapshots = self._held.get(name, [])
            if name not in self._before or self._before[name] is not value:
                if name in self._before and _is(self._before[name], value):
                    continue
                change: Change | None = Change(value)
            elif not any(snapshot.is_changed() for snapshot in snapshots):
                continue
            elif isinstance(value, (list, deque)) and not any(snapshot.is_changed() for snapshot in snapshots[1:]):
                before, items = list(snapshots[0].before.values()), list(value)
                appends = len(items) > len(before) and all(map(_is, before, items))
                change = Change(items[len(before) :] if appends else value, appends)
            else:
                change = Change(value) if _is_array(value) else None
            if change is not None and _can_be_sent(change.value):
                repeatable[name] = change
            else:
                others.append(name)
        return repeatable, others


class Change:
    """Change of an attribute.

    Args:
        value: the new value of the attribute, or the items that were appended to it.
        appends: whether `value` holds appended items.
    """

    def __init__(self, value: Any, appends: bool = False) -> None:
        self.value, self.appends = value, appends

    def packed(self) -> Change:
        """Return the change with its tensors detached and on the CPU, to be sent to other ranks."""
        return Change(map_tensors(_Packed, self.value), self.appends)

    def repeat(self, module: nn.Module, name: str, device: torch.device) -> None:
        """Apply a packed change of another rank to this rank's module.

        Args:
            module: the user's module.
            name: name of the attribute.
            device: device of this rank, for tensors that were on the device of the rank that packed them.
        """
        value = map_kind(_Packed, lambda each: each.tensor if each.on_host else each.tensor.to(device), self.value)
        if self.appends:
            vars(module)[name].extend(value)
        else:
            vars(module)[name] = value


class _Packed:
    """Tensor on the CPU that remembers whether it was there before."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.on_host = tensor.detach().cpu(), tensor.device.type == "cpu"


class _Held(NamedTuple):
    """Snapshot of a container, an object or an array that a step may change in place.

    Attributes:
        value: the container, object, tensor or NumPy array itself.
        before: its entries, or a copy of the array; None for a tensor that is not copied.
        version: autograd's version counter of a tensor.
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
        return now.keys() != before.keys() or not all(_is(entry, now[key]) for key, entry in before.items())

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


def _snapshots_of(value: Any, depth: int, copies: bool = True) -> Iterator[_Held]:
    """Yield snapshots of a value that a step may change in place, then of its contents; copy tensors if `copies`."""
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
        for entry in () if large else entries.values():
            yield from _snapshots_of(entry, depth - 1, copies)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or type(value) is Tensor


def _entries(value: Any) -> dict[Any, Any] | None:
    """Return a container's entries by key or index, or an object's attributes (e.g. a meter's); None for others."""
    if isinstance(value, (list, deque)):
        return dict(enumerate(value))
    if isinstance(value, (dict, set)):
        return dict(value) if isinstance(value, dict) else dict.fromkeys(value)
    if isinstance(value, (nn.Module, Tensor, type, ModuleType, Enum)) or callable(value):
        return None
    attributes = getattr(value, "__dict__", None)
    return dict(attributes) if isinstance(attributes, dict) else None


def _is(one: Any, other: Any) -> bool:
    """Return whether two values are the same object, or equal plain values of one type."""
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and bool(one == other))


def _version(value: Any) -> int:
    return 0 if value.is_inference() else value._version  # inference tensors have no version counter


def _can_be_sent(value: Any) -> bool:
    """Return whether a value can be sent to other ranks: it is plain, or it can be pickled and is small."""
    if isinstance(value, (Tensor, np.ndarray, np.generic, *PLAIN)):
        return True
    if children := children_of(value):
        return all(map(_can_be_sent, children))
    try:
        return len(pickle.dumps(value)) < SMALL
    except Exception:  # pickling calls methods of the user's class, which may raise anything
        return False


# ---------------------------------------------------------------- steps without side effects


@contextmanager
def restore_submodules(module: LightningModule) -> Iterator[None]:
    """Context that restores at its end the attributes of all submodules, and the hooks of all modules."""
    tables = [attributes[name] for attributes in map(vars, module.modules()) for name in HOOKS if name in attributes]
    with ExitStack() as back:
        for table in tables:
            back.callback(_restore_table, table, dict(table))
        for submodule in module.modules():
            if submodule is not module:
                back.callback(Attributes(submodule).undo)
        yield


@contextmanager
def without_side_effects(module: LightningModule, device: torch.device = HOST, reads: bool = True) -> Iterator[None]:
    """Context in which nothing is logged and no metric is updated.

    Its end restores attributes of the module, options of optimizers and schedulers, and all random generators in use.

    Args:
        module: the user's module.
        device: device of the module.
        reads: whether logged values and metric inputs are read, so that the analysis of the step sees them used.
    """
    trainer, snapshot, random_state = module.trainer, Attributes(module), RandomState.now(device=device)
    read = _read if reads else _zero
    # learning rates and other options
    settings: list[dict[str, Any]] = [group for each in trainer.optimizers for group in each.param_groups]
    settings += [vars(config.scheduler) for config in trainer.lr_scheduler_configs]
    with ExitStack() as back:
        back.callback(random_state.restore, device=device)
        for table in settings:
            back.callback(_restore_table, table, dict(table))
        for generator in generators_of_modules(module):
            back.callback(generator.set_state, generator.get_state())
        back.callback(setattr, trainer, "loggers", trainer.loggers)
        trainer.loggers = [DummyLogger() for _ in trainer.loggers]  # for steps that call loggers directly
        for submodule in module.modules():
            if isinstance(submodule, (Metric, MetricCollection)):
                back.enter_context(internals.replaced(submodule, "update", read))
            if isinstance(submodule, Metric):
                back.enter_context(internals.replaced(submodule, "forward", read))
                back.enter_context(internals.replaced(submodule, "compute", _zero))
        back.enter_context(internals.replaced(module, "log", _read_to_log if reads else _zero))
        back.callback(snapshot.undo)
        yield


def _restore_table(table: dict[str, Any], before: dict[str, Any]) -> None:
    table.clear()
    table.update(before)


def _read(*args: Any, **kwargs: Any) -> Tensor:
    """Read tensors as logging and metrics would, so that an analysis of the step sees that they are used."""
    for tensor in tensors_of((args, kwargs)):
        torch.equal(tensor, tensor)
    return torch.zeros(())


def _read_to_log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    try:
        if "reduce_fx" in kwargs:  # raises Lightning's error for an unknown reduction
            _Metadata("training_step", name, reduce_fx=kwargs["reduce_fx"])
    except MisconfigurationException as error:
        raise UnsupportedStepError(str(error)) from None
    _read(value)


def _zero(*_: Any, **__: Any) -> Tensor:
    return torch.zeros(())
