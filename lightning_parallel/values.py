"""Nested values, as steps take and blocks return them: mappings, lists, tuples, dataclasses, and tensors in them."""

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
    """The tensors in a value, from the first to the last."""
    found: list[Tensor] = []
    ahead = [value]  # no recursion: a step asks this of all that its stages send, and each level would cost a call
    while ahead:
        each = ahead.pop()
        if isinstance(each, Tensor):
            found.append(each)
        elif not isinstance(each, ATOMS):
            ahead.extend(reversed(children_of(each)))
    return found


def held_by_objects(value: Any, depth: int = 3) -> Iterator[tuple[Any, Tensor]]:
    """The objects of other classes in a value, each with the tensors among its attributes.

    Args:
        value: any.
        depth: how many objects deep to look.
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
    names = [name for some in slots for name in ((some,) if isinstance(some, str) else some)]
    for attribute in _set_fields(value, [*getattr(value, "__dict__", ()), *names]):
        for tensor in tensors_of(attribute):
            yield value, tensor
        yield from held_by_objects(attribute, depth - 1)


def children_of(value: Any) -> list[Any]:
    """The children of a container; nothing for anything else."""
    return _children_by(value.__class__)(value)


@functools.cache  # to ask whether a class is a mapping takes longer than all else, and each value in a message is asked
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
    """The fields that are set: a copy that is being made has its tensors copied before all of them are."""
    found = []
    for name in names:
        with contextlib.suppress(AttributeError):
            found.append(getattr(value, name))
    return found


@functools.cache
def field_names(kind: Any) -> tuple[str, ...]:
    """The names of the fields of a dataclass; none of any other class."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def batch_size(batch: Any) -> int | None:
    """The number of samples in a batch: the first dimension that most of its tensors have.

    Where there are no tensors, the length that most lists of plain values have, as those of texts; None where nothing
    tells. `samples_in` also knows lists with an item for each sample, as the targets of a detector.
    """
    sizes = [tensor.size(0) for tensor in tensors_of(batch) if tensor.dim()] or [*map(len, _plain_lists(batch))]
    return Counter(sizes).most_common(1)[0][0] if sizes else None


def holds_alike(value: Any) -> bool:
    """Whether a value is a list, or a tuple, of containers or tensors of one kind, as of targets or pictures."""
    if not isinstance(value, (list, tuple)) or not value or isinstance(value[0], ATOMS):
        return False
    return len({(each.dtype, each.dim()) if isinstance(each, Tensor) else type(each) for each in value}) == 1


def outline_of(value: Any) -> Any:
    """What a nested value of plain containers and tensors is, but for numbers; None where it holds others."""
    kind = type(value)
    if kind is Tensor:
        return value.dtype, value.shape
    if kind in (int, float, str, bool):
        return kind
    if kind not in (dict, list, tuple):
        return None
    parts = [*map(outline_of, value.values() if kind is dict else value)]
    return None if None in parts else (kind, tuple(value) if kind is dict else (), *parts)


def _plain_lists(value: Any) -> Iterator[Sequence[Any]]:
    """Lists in a batch that hold no others: of those nobody knows whether they hold samples or are samples."""
    children = children_of(value)
    if not isinstance(value, (list, tuple)):
        for child in children:
            yield from _plain_lists(child)
    elif children and not any(isinstance(child, Tensor) or children_of(child) for child in children):
        yield value


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """The structure of a value with every tensor changed."""
    return map_kind(Tensor, change, value)


def map_kind(kind: type[T], change: Callable[[T], Any], value: Any) -> Any:
    """The structure of a value with everything of a kind changed, containers among them."""
    if isinstance(value, kind):
        return change(value)
    children = [] if isinstance(value, LEAVES) else children_of(value)
    return rebuilt(value, [map_kind(kind, change, child) for child in children]) if children else value


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """The structure of a value with everything changed that holds nothing else."""
    children = [] if isinstance(value, LEAVES) else children_of(value)
    return rebuilt(value, [map_leaves(change, child) for child in children]) if children else change(value)


def rebuilt(value: Any, children: Sequence[Any]) -> Any:
    """A container like `value` with other children."""
    if isinstance(value, (list, tuple)):
        return like(value, children)
    if isinstance(value, Mapping):
        items = dict(zip(value, children, strict=True))
        if type(value) is dict:
            return items
        filled: Any = copy.copy(value)
        for key, item in items.items():
            filled[key] = item
        return filled
    made = copy.copy(value)
    for name, child in zip(field_names(value.__class__), children, strict=True):
        object.__setattr__(made, name, child)
    return made


def like(value: Any, items: Sequence[Any]) -> Any:
    """A list or tuple of the class of `value`."""
    make = getattr(type(value), "_make", type(value))  # named tuples alone take their items one by one
    return make(items)


class TensorSpec:
    """Shape and dtype of a tensor: what a receiver must know of it. No dataclass, for these are containers here."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The shape and the dtype of this tensor; raises TypeError for a nested one, which has no one shape."""
        if tensor.is_nested:
            raise TypeError(
                "a block got or returned a nested tensor, which has no one shape to tell other stages; let samples be "
                "padded, with a mask: for torch.nn.TransformerEncoder(..., enable_nested_tensor=False)"
            )
        return cls(tuple(tensor.shape), tensor.dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorSpec) and type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))

    def __repr__(self) -> str:
        return f"a tensor of shape {self.shape} and {self.dtype}"

    def empty(self, device: torch.device | str) -> Tensor:
        """A tensor like it, without values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def taken_apart(value: Any) -> tuple[list[Any], Any]:
    """The leaves of a value, and its form; of tuples, lists and dicts without pytree, which takes its time."""
    leaves: list[Any] = []
    form = _form_of(value, leaves)
    if all(isinstance(leaf, LEAVES) for leaf in leaves):
        return leaves, form
    return tree_flatten(value)


def _form_of(value: Any, leaves: list[Any]) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, *[_form_of(each, leaves) for each in value]
    if kind is dict:
        return kind, tuple(value), *[_form_of(each, leaves) for each in value.values()]
    leaves.append(value)
    return None


def put_together(leaves: list[Any], form: Any) -> Any:
    """The value of this form with these leaves. The opposite of `taken_apart`."""
    return tree_unflatten(leaves, form) if isinstance(form, TreeSpec) else _value_of(form, iter(leaves))


def _value_of(form: Any, leaves: Iterator[Any]) -> Any:
    if form is None:
        return next(leaves)
    if form[0] is dict:
        return {name: _value_of(each, leaves) for name, each in zip(form[1], form[2:], strict=True)}
    made = [_value_of(each, leaves) for each in form[1:]]
    return tuple(made) if form[0] is tuple else made


def are_same(now: Any, before: Any) -> bool:
    """Whether containers hold the same tensors and equal atoms in the same places."""
    if type(now) is not type(before) or (isinstance(now, dict) and list(now) != list(before)):
        return False
    if isinstance(now, ATOMS):
        return bool(now == before)
    if isinstance(now, Tensor) or tree_is_leaf(now):
        return now is before
    inner, former = [list(each) if isinstance(each, (list, tuple)) else tree_leaves(each) for each in (now, before)]
    return len(inner) == len(former) and all(map(are_same, inner, former))


def add_note(exception: BaseException, *texts: str) -> None:
    """Add texts that Python, torchrun and torch's launcher print below the exception's traceback."""
    if any(texts):
        notes = vars(exception).setdefault("__notes__", [])  # `add_note` came with Python 3.11
        notes += [text for text in texts if text and text not in notes]
