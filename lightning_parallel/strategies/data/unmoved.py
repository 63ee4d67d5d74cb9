"""What users made to read data stands where it stood, after somebody has looked at a batch.

Datasets, samplers and functions that collate count epochs, and draw by generators of their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DEEP, MOST = 5, 100
"""How far within objects is looked, and how many members a container has at most that is looked into."""

LIBRARIES = ("lightning", "torchmetrics", "builtins", "collections")


@contextmanager
def unmoved(objects: Iterable[Any]) -> Iterator[None]:
    """Afterwards these objects, and those within, have the attributes that they had, and generators their states."""
    back = [*_ways_back(list(objects), DEEP, set())]
    try:
        yield
    finally:
        for restore in back:
            restore()


def _ways_back(objects: Iterable[Any], deep: int, seen: set[int]) -> Iterator[Callable[[], object]]:
    for each in objects:
        if id(each) in seen or not deep or isinstance(each, (Tensor, nn.Module, type)):
            continue
        seen.add(id(each))
        if (restore := _of_generator(each)) is not None:
            yield restore
            continue
        if type(each).__module__.partition(".")[0] not in LIBRARIES and isinstance(table := _table(each), dict):
            yield partial(_restore, table, dict(table))
        yield from _ways_back(_within(each), deep - 1, seen)


def _of_generator(value: Any) -> Callable[[], object] | None:
    """What puts a generator back to where it stands now; None for anything else."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    return partial(value.setstate, value.getstate()) if isinstance(value, random.Random) else None


def _table(value: Any) -> Any:
    return None if isinstance(value, (FunctionType, MethodType)) else getattr(value, "__dict__", None)


def _within(value: Any) -> list[Any]:
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, FunctionType):
        return [content for cell in value.__closure__ or () for content in _contents(cell)]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    members = list(vars(value).values()) if isinstance(_table(value), dict) else []
    if isinstance(value, (list, tuple, dict)) and len(value) <= MOST:
        members += value.values() if isinstance(value, dict) else value
    return members


def _contents(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it has none yet
        return []


def _restore(table: dict[str, Any], before: dict[str, Any]) -> None:
    for name in table.keys() - before.keys():
        del table[name]
    for name, value in before.items():
        if name not in table or table[name] is not value:
            table[name] = value
