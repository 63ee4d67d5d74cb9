"""What users made to read data stands where it stood, after somebody has looked at a batch.

Datasets, samplers and functions that collate count epochs, and draw by generators of their own.
"""

from __future__ import annotations

import operator
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from lightning_parallel.strategies.lightning_package import LightningDataModule

DEEP, MOST = 5, 100
"""How far within objects is looked, and how many members a container has at most that is looked into."""

LARGE = 2**22
"""The number of elements from which on an array is not looked at."""

LIBRARIES = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_parallel", "torchmetrics"}
THREADS = {"logging", "threading", "queue", "multiprocessing", "concurrent", "asyncio"}
PLAIN = {"builtins", "collections"}


@contextmanager
def unmoved(objects: Iterable[Any]) -> Iterator[None]:
    """Afterwards these objects, and those within, have the attributes, members and random states that they had.

    What runs them is left alone, be it a trainer or a logger: other threads may use it meanwhile.
    """
    back = [*_ways_back(list(objects), DEEP, set())]
    try:
        yield
    finally:
        for restore in back:
            restore()


def _ways_back(objects: Iterable[Any], deep: int, seen: set[int]) -> Iterator[Callable[[], object]]:
    for each in objects:
        if id(each) in seen or not deep or not _may_read_data(each):
            continue
        seen.add(id(each))
        if (restore := _of_generator(each)) is not None:
            yield restore
            continue
        if (restore := _of_members(each)) is not None:
            yield restore
        if not _packages(type(each)) & (LIBRARIES | PLAIN) and isinstance(table := _table(each), dict):
            yield partial(_restore, table, dict(table))
        yield from _ways_back(_within(each), deep - 1, seen)


def _may_read_data(value: Any) -> bool:
    """Whether a value may be there to read data; of Lightning's kinds data modules are, and what is iterated over."""
    if isinstance(value, (nn.Module, type, ModuleType)):
        return False
    if isinstance(value, (Dataset, Sampler, LightningDataModule)):
        return True
    packages = {package for kind in type(value).__mro__ for package in _packages(kind)}
    is_pass = isinstance(value, Iterator)  # one that is running
    return not is_pass and not packages & THREADS and (isinstance(value, Iterable) or not packages & LIBRARIES)


def _packages(kind: type) -> set[str]:
    return {kind.__module__.partition(".")[0]}


def _of_generator(value: Any) -> Callable[[], object] | None:
    """What puts a generator back to where it stands now; None for anything else."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    return partial(value.setstate, value.getstate()) if isinstance(value, random.Random) else None


def _of_members(value: Any) -> Callable[[], object] | None:
    """What gives a container or an array the members that it has now; None for anything else."""
    if isinstance(value, (list, deque)):
        return partial(_refill, value, list(value))
    if isinstance(value, dict):
        return partial(_restore, value, dict(value))
    if isinstance(value, set):
        return partial(_regather, value, set(value))
    if type(value) is np.ndarray and value.size < LARGE and value.flags.writeable:
        return partial(np.copyto, value, value.copy())
    if type(value) is Tensor and value.numel() < LARGE and not value.requires_grad and not value.is_inference():
        return partial(_write, value, value.clone(), value._version)
    return None


def _table(value: Any) -> Any:
    return None if isinstance(value, (FunctionType, MethodType)) else getattr(value, "__dict__", None)


def _within(value: Any) -> list[Any]:
    if isinstance(value, (Tensor, np.ndarray)):
        return []
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, FunctionType):
        return [content for cell in value.__closure__ or () for content in _contents(cell)]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    members = list(vars(value).values()) if isinstance(_table(value), dict) else []
    if isinstance(value, (list, tuple, dict, deque)) and len(value) <= MOST:
        members += value.values() if isinstance(value, dict) else value
    return members


def _contents(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it has none yet
        return []


def _restore(table: dict[Any, Any], before: dict[Any, Any]) -> None:
    for name in table.keys() - before.keys():
        del table[name]
    for name, value in before.items():
        if name not in table or table[name] is not value:
            table[name] = value
    if list(table) != list(before):  # they came back in another order
        table.clear()
        table.update(before)


def _refill(members: Any, before: list[Any]) -> None:
    if len(members) != len(before) or any(map(operator.is_not, members, before)):
        members.clear()
        members.extend(before)


def _regather(members: set[Any], before: set[Any]) -> None:
    members ^= members ^ before


def _write(tensor: Tensor, before: Tensor, version: int) -> None:
    if tensor._version != version:
        tensor.copy_(before)
