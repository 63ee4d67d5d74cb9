"""Slices, and elements chosen by number."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.techniques.divided.meeting import as_divided, brought_together
from lightning_parallel.techniques.divided.rules.shapes import sliced
from lightning_parallel.techniques.divided.table import NAMES, operations, rule
from lightning_parallel.techniques.divided.tensor import Divided, is_divided

INDICES = (slice, int, torch.SymInt, Tensor, type(None), type(Ellipsis))
"""What the rule reads; lists and arrays of other libraries, which choose as tensors do, get the whole."""


@rule(Tensor.__getitem__)
def _item(func: Any, args: Any, kwargs: Any) -> Any:
    """Slices, numbers and None, or one tensor in front of whole dimensions, whose choice comes first then."""
    divided, index = args
    if not is_divided(divided):
        return NotImplemented  # a divided index
    given = list(index) if isinstance(index, tuple) else [index]
    index = given
    if isinstance(args[1], tuple):  # a list of one number among other indices is a slice
        ones = [isinstance(each, list) and len(each) == 1 and type(each[0]) is int for each in given]
        pairs = zip(given, ones, strict=True)
        index = [slice(each[0], each[0] + 1 or None) if one else each for each, one in pairs]
    if any(is_divided(each) or isinstance(each, bool) or not isinstance(each, INDICES) for each in index):
        return NotImplemented
    # An entry for every dimension in place of an ellipsis, and None for each new one.
    used = sum(each.dim() if _is_mask(each) else 1 for each in index if each is not None and each is not Ellipsis)
    free = [slice(None)] * (divided.dim() - used)
    place = next((k for k, each in enumerate(index) if each is Ellipsis), len(index))
    spelled = [*index[:place], *free, *index[place + 1 :]]
    if any(isinstance(each, Tensor) for each in spelled):
        chooser, *rest = spelled
        if not isinstance(chooser, Tensor) or any(isinstance(each, Tensor) or each != slice(None) for each in rest):
            return NotImplemented
        # A mask or numbers, which all ranks have alike, choose in dimensions that are not divided.
        if any(dim < (chooser.dim() if _is_mask(chooser) else 1) for dim in divided.cuts):
            return NotImplemented
        chosen = divided.own[chooser]
        shift = chosen.dim() - divided.dim()
        return Divided(chosen, {dim + shift: elements for dim, elements in divided.cuts.items()})
    made = _sliced_by_all(divided, spelled)
    copies = made is not NotImplemented and any(isinstance(each, list) for each in given)
    return Divided(made.own.clone(), made.cuts) if copies else made


@rule(*operations("narrow", "select"))
def _one_part(func: Any, args: Any, kwargs: Any) -> Any:
    """A slice, or one place, of one dimension."""
    named = [kwargs[name] for name in ("dim", "start", "index", "length") if name in kwargs]
    divided, dim, *place = list(args) + named
    if not is_divided(divided) or not all(isinstance(each, int) for each in (dim, *place)):
        return NotImplemented
    dim, lost = dim % divided.dim(), NAMES[func] == "select"
    if dim not in divided.cuts:
        return Divided(func(divided.own, dim, *place), {k - (lost and k > dim): e for k, e in divided.cuts.items()})
    if lost:
        return NotImplemented
    (start, length), size = place, divided.shape[dim]
    start += size * (start < 0)
    if not 0 <= start <= start + length <= size:
        return NotImplemented  # torch says what is wrong
    return sliced(divided, dim, start, start + length)


def _is_mask(each: Any) -> bool:
    return isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8)


def _sliced_by_all(divided: Divided, index: list[Any]) -> Any:
    """The result of slices, numbers and None: divided dimensions are sliced here, torch does the rest."""
    made, cuts, dim, place, own_index = divided, {}, 0, 0, []
    for each in index:
        if each is None:
            place += 1
        elif dim in divided.cuts:
            if not isinstance(each, slice) or each.step not in (None, 1):
                return NotImplemented
            size = divided.shape[dim]
            start, stop = _end(each.start, 0, size), _end(each.stop, size, size)
            stop = max(start, stop)
            made = made if (start, stop) == (0, size) else sliced(made, dim, start, stop)
            cuts[place] = made.cuts[dim]
            each, dim, place = slice(None), dim + 1, place + 1
        else:
            dim, place = dim + 1, place + isinstance(each, slice)
        own_index.append(each)
    return Divided(made.own[tuple(own_index)], cuts)


def _end(given: Any, otherwise: int, size: int) -> int:
    """One of those that `slice.indices` gives, which torch 2.11 does not compile."""
    if given is None:
        return otherwise
    place: int = given if isinstance(given, int) else operator.index(given)
    return max(place + size, 0) if place < 0 else min(place, size)


@rule(*operations("gather", "take_along_dim"))
def _gathered_by_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Each element of the result comes from the same place, but for one dimension."""
    if kwargs or len(args) != 3 or not isinstance(args[0], Tensor):
        return NotImplemented
    tensor, dim, index = args if NAMES[func] == "gather" else (args[0], args[2], args[1])
    if not isinstance(dim, int) or tensor.dim() != index.dim():
        return NotImplemented
    dim %= tensor.dim()
    alike = all(k == dim or tensor.shape[k] == index.shape[k] for k in range(tensor.dim()))
    if not alike or any(is_divided(each) and dim in each.cuts for each in (tensor, index)):
        return NotImplemented
    names = [k if k != dim else None for k in range(tensor.dim())]
    mine = brought_together((tensor, index), (names, names))
    if mine is None:
        return NotImplemented
    return as_divided(torch.gather(mine[0][0], dim, mine[0][1]), mine[1])
