"""Nested values, as steps take and blocks return them: mappings, lists, tuples, dataclasses, and tensors in them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in a value."""
    if isinstance(value, Tensor):
        yield value
    for child in children_of(value):
        yield from tensors_of(child)


def children_of(value: Any) -> list[Any]:
    """What a container holds; nothing for anything else."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return []


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """The same structure with every tensor changed."""
    return map_leaves(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with everything changed that holds nothing else."""
    children = children_of(value)
    return rebuilt(value, [map_leaves(change, child) for child in children]) if children else change(value)


def rebuilt(value: Any, children: Sequence[Any]) -> Any:
    """A container like `value` with other children."""
    if isinstance(value, Mapping):
        return _filled(value, dict(zip(value, children, strict=True)))
    if isinstance(value, (list, tuple)):
        return like(value, children)
    made = copy.copy(value)
    for field, child in zip(dataclasses.fields(value), children, strict=True):
        object.__setattr__(made, field.name, child)
    return made


def like(value: Any, items: Sequence[Any]) -> Any:
    """A list or tuple of the class of `value`."""
    return type(value)(*items) if isinstance(value, tuple) and type(value) is not tuple else type(value)(items)


def _filled(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    made: Any = copy.copy(value)
    for key, item in items.items():
        made[key] = item
    return made
