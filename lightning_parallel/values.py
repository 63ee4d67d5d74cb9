"""Nested values as steps take and blocks return them: mappings, lists, tuples and dataclasses that contain tensors."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_is_leaf, tree_leaves, tree_unflatten

T = TypeVar("T")

ATOMS = (int, float, complex, str, bytes, type(None))
LEAVES = (Tensor, *ATOMS)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a value, in order."""
    tensors: list[Tensor] = []
    stack = [value]  # no recursion: called for all values that stages send in a step, and each level would cost a call
    while stack:
        current = stack.pop()
        if isinstance(current, Tensor):
            tensors.append(current)
        elif not isinstance(current, ATOMS):
            stack.extend(reversed(children_of(current)))
    return tensors


def held_by_objects(value: Any, depth: int = 3) -> Iterator[tuple[Any, Tensor]]:
    """Yield (object, tensor) for each tensor among the attributes of objects in a value that are no containers.

    Args:
        value: any object.
        depth: how many objects deep to search.
    """
    if isinstance(value, LEAVES) or depth == 0:
        return
    if children := children_of(value):
        for child in children:
            yield from held_by_objects(child, depth)
        return
    if isinstance(value, (type, ModuleType, FunctionType)):
        return
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)]
    for attribute in _set_fields(value, [*getattr(value, "__dict__", ()), *names]):
        for tensor in tensors_of(attribute):
            yield value, tensor
        yield from held_by_objects(attribute, depth - 1)


def children_of(value: Any) -> list[Any]:
    """Return the children of a container; an empty list for any other value."""
    return _children_by(value.__class__)(value)


@functools.cache  # the check for a mapping is the slowest part, and every value in a message is checked
def _children_by(kind: Any) -> Callable[[Any], list[Any]]:
    if issubclass(kind, (list, tuple)):
        return list
    if issubclass(kind, Mapping):
        return lambda value: list(value.values())
    names = field_names(kind)
    if not names:
        return lambda value: []
    fields = attrgetter(*names)

    def children(value: Any) -> list[Any]:
        try:
            return list(fields(value)) if len(names) > 1 else [fields(value)]
        except AttributeError:
            return _set_fields(value, names)

    return children


def _set_fields(value: Any, names: Sequence[str]) -> list[Any]:
    """Return the fields that are set: while a dataclass is copied, its tensors are copied before all fields are set."""
    fields = []
    for name in names:
        with contextlib.suppress(AttributeError):
            fields.append(getattr(value, name))
    return fields


@functools.cache
def field_names(kind: Any) -> tuple[str, ...]:
    """Return the field names of a dataclass; none for any other class."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def batch_size(batch: Any) -> int | None:
    """Return the number of samples in a batch: the most frequent first dimension of its tensors.

    Without tensors, the most frequent length of its lists of plain values, such as texts; None if there are no such
    lists. `samples_in` also handles lists with one item per sample, such as the targets of a detector.
    """
    sizes = [tensor.size(0) for tensor in tensors_of(batch) if tensor.dim()] or [*map(len, _plain_lists(batch))]
    return Counter(sizes).most_common(1)[0][0] if sizes else None


def is_list_of_one_kind(value: Any) -> bool:
    """Return whether a value is a list or tuple of containers or tensors of one kind, such as targets or images."""
    if not isinstance(value, (list, tuple)) or not value or isinstance(value[0], ATOMS):
        return False
    return len({(item.dtype, item.dim()) if isinstance(item, Tensor) else type(item) for item in value}) == 1


def structure_of(value: Any) -> Any:
    """Return types, keys, dtypes and shapes of a value of plain containers and tensors; None if others are in it."""
    kind = type(value)
    if kind is Tensor:
        return value.dtype, value.shape
    if kind in (int, float, str, bool):
        return kind
    if kind not in (dict, list, tuple):
        return None
    outlines = [*map(structure_of, value.values() if kind is dict else value)]
    return None if None in outlines else (kind, tuple(value) if kind is dict else (), *outlines)


def _plain_lists(value: Any) -> Iterator[Sequence[Any]]:
    """Yield the lists in a batch that hold only plain values; other lists may hold samples or be samples themselves."""
    children = children_of(value)
    if not isinstance(value, (list, tuple)):
        for child in children:
            yield from _plain_lists(child)
    elif children and not any(isinstance(child, Tensor) or children_of(child) for child in children):
        yield value


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a value of the same structure with `change` applied to every tensor."""
    return map_kind(Tensor, change, value)


def map_kind(kind: type[T], change: Callable[[T], Any], value: Any) -> Any:
    """Return a value of the same structure with `change` applied to every object of a class, containers included."""
    if isinstance(value, kind):
        return change(value)
    children = [] if isinstance(value, LEAVES) else children_of(value)
    return rebuilt(value, [map_kind(kind, change, child) for child in children]) if children else value


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a value of the same structure with `change` applied to every leaf."""
    children = [] if isinstance(value, LEAVES) else children_of(value)
    return rebuilt(value, [map_leaves(change, child) for child in children]) if children else change(value)


def rebuilt(value: Any, children: Sequence[Any]) -> Any:
    """Return a container like `value` with other children."""
    if isinstance(value, (list, tuple)):
        return like(value, children)
    if isinstance(value, Mapping):
        items = dict(zip(value, children, strict=True))
        if type(value) is dict:
            return items
        copied: Any = copy.copy(value)
        for key, item in items.items():
            copied[key] = item
        return copied
    clone = copy.copy(value)
    for name, child in zip(field_names(value.__class__), children, strict=True):
        object.__setattr__(clone, name, child)
    return clone


def like(value: Any, items: Sequence[Any]) -> Any:
    """Return a list or tuple of the class of `value` with other items."""
    make = getattr(type(value), "_make", type(value))  # the constructor of a named tuple takes its items one by one
    return make(items)


class TensorSpec:
    """Shape and dtype of a tensor, as a receiver needs them. Not a dataclass, for dataclasses are containers here."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return shape and dtype of a tensor; raise TypeError for a nested tensor, which has no single shape."""
        if tensor.is_nested:
            raise TypeError(
                "a block got or returned a nested tensor, which has no single shape to send to other stages; pad the "
                "samples, with a mask; set torch.nn.TransformerEncoder(..., enable_nested_tensor=False)"
            )
        return cls(tuple(tensor.shape), tensor.dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorSpec) and type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"a tensor of shape {self.shape} and {self.dtype}"

    def empty(self, device: torch.device | str) -> Tensor:
        """Return an uninitialized tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def flatten_value(value: Any) -> tuple[list[Any], Any]:
    """Flatten a value to its leaves and its structure; tuples, lists and dicts without pytree, which is slower."""
    leaves: list[Any] = []
    form = _form_of(value, leaves)
    if all(isinstance(leaf, LEAVES) for leaf in leaves):
        return leaves, form
    return tree_flatten(value)


def _form_of(value: Any, leaves: list[Any]) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, *[_form_of(child, leaves) for child in value]
    if kind is dict:
        return kind, tuple(value), *[_form_of(child, leaves) for child in value.values()]
    leaves.append(value)
    return None


def unflatten_value(leaves: list[Any], form: Any) -> Any:
    """Rebuild the value of a structure from its leaves; the inverse of `flatten_value`."""
    return tree_unflatten(leaves, form) if isinstance(form, TreeSpec) else _value_of(form, iter(leaves))


def _value_of(form: Any, leaves: Iterator[Any]) -> Any:
    if form is None:
        return next(leaves)
    if form[0] is dict:
        return {name: _value_of(child, leaves) for name, child in zip(form[1], form[2:], strict=True)}
    children = [_value_of(child, leaves) for child in form[1:]]
    return tuple(children) if form[0] is tuple else children


def are_same(now: Any, before: Any) -> bool:
    """Return whether containers hold the same tensors and equal atoms in the same places."""
    if type(now) is not type(before) or (isinstance(now, dict) and list(now) != list(before)):
        return False
    if isinstance(now, ATOMS):
        return bool(now == before)
    if isinstance(now, Tensor) or tree_is_leaf(now):
        return now is before
    items, former = [list(each) if isinstance(each, (list, tuple)) else tree_leaves(each) for each in (now, before)]
    return len(items) == len(former) and all(map(are_same, items, former))


def add_note(exception: BaseException, *texts: str) -> None:
    """Add texts that Python, torchrun and torch's launcher print below the exception's traceback."""
    if any(texts):
        notes = vars(exception).setdefault("__notes__", [])  # `add_note` came with Python 3.11
        notes += [text for text in texts if text and text not in notes]
