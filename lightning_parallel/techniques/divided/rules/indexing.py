"""Rules of slicing, and of choosing elements by index."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.techniques.divided.alignment import align_shardings, as_divided
from lightning_parallel.techniques.divided.rules.shapes import sliced
from lightning_parallel.techniques.divided.table import NAMES, operations, rule
from lightning_parallel.techniques.divided.tensor import Divided, is_divided

INDICES = (slice, int, torch.SymInt, Tensor, type(None), type(Ellipsis))
"""Index types that the rule reads; lists and arrays, which choose as tensors do, fall back to full tensors."""


@rule(Tensor.__getitem__)
def _item(func: Any, args: Any, kwargs: Any) -> Any:
    """Slices, integers and None; or one index tensor before full slices, whose dimensions come first in the result."""
    divided, index = args
    if not is_divided(divided):
        return NotImplemented  # only the index is a `Divided` tensor
    entries = list(index) if isinstance(index, tuple) else [index]
    index = entries
    if isinstance(args[1], tuple):  # a list of one integer among other indices acts as a slice
        is_one_list = [isinstance(each, list) and len(each) == 1 and type(each[0]) is int for each in entries]
        pairs = zip(entries, is_one_list, strict=True)
        index = [slice(each[0], each[0] + 1 or None) if is_one else each for each, is_one in pairs]
    if any(is_divided(each) or isinstance(each, bool) or not isinstance(each, INDICES) for each in index):
        return NotImplemented
    # One entry for every dimension, with slices in place of an ellipsis, and None for each new dimension.
    used = sum(each.dim() if _is_mask(each) else 1 for each in index if each is not None and each is not Ellipsis)
    free = [slice(None)] * (divided.dim() - used)
    position = next((k for k, each in enumerate(index) if each is Ellipsis), len(index))
    spelled = [*index[:position], *free, *index[position + 1 :]]
    if any(isinstance(each, Tensor) for each in spelled):
        chooser, *rest = spelled
        if not isinstance(chooser, Tensor) or any(isinstance(each, Tensor) or each != slice(None) for each in rest):
            return NotImplemented
        # An index tensor is the same on all ranks; it may choose in dimensions that are not sharded.
        if any(dim < (chooser.dim() if _is_mask(chooser) else 1) for dim in divided.cuts):
            return NotImplemented
        shard = divided.own[chooser]
        shift = shard.dim() - divided.dim()
        return Divided(shard, {dim + shift: elements for dim, elements in divided.cuts.items()})
    result = _sliced_by_all(divided, spelled)
    copies = result is not NotImplemented and any(isinstance(each, list) for each in entries)
    return Divided(result.own.clone(), result.cuts) if copies else result


@rule(*operations("narrow", "select"))
def _one_part(func: Any, args: Any, kwargs: Any) -> Any:
    """A slice or one index of one dimension."""
    by_keyword = [kwargs[name] for name in ("dim", "start", "index", "length") if name in kwargs]
    divided, dim, *bounds = list(args) + by_keyword
    if not is_divided(divided) or not all(isinstance(each, int) for each in (dim, *bounds)):
        return NotImplemented
    dim, drop = dim % divided.dim(), NAMES[func] == "select"
    if dim not in divided.cuts:
        return Divided(func(divided.own, dim, *bounds), {k - (drop and k > dim): e for k, e in divided.cuts.items()})
    if drop:
        return NotImplemented
    (start, length), size = bounds, divided.shape[dim]
    start += size * (start < 0)
    if not 0 <= start <= start + length <= size:
        return NotImplemented  # torch raises the error
    return sliced(divided, dim, start, start + length)


def _is_mask(each: Any) -> bool:
    return isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8)


def _sliced_by_all(divided: Divided, index: list[Any]) -> Any:
    """Apply slices, integers and None: sharded dimensions are sliced here, torch does the rest."""
    result, cuts, dim, result_dim, local_index = divided, {}, 0, 0, []
    for each in index:
        if each is None:
            result_dim += 1
        elif dim in divided.cuts:
            if not isinstance(each, slice) or each.step not in (None, 1):
                return NotImplemented
            size = divided.shape[dim]
            start, stop = _end(each.start, 0, size), _end(each.stop, size, size)
            stop = max(start, stop)
            result = result if (start, stop) == (0, size) else sliced(result, dim, start, stop)
            cuts[result_dim] = result.cuts[dim]
            each, dim, result_dim = slice(None), dim + 1, result_dim + 1
        else:
            dim, result_dim = dim + 1, result_dim + isinstance(each, slice)
        local_index.append(each)
    return Divided(result.own[tuple(local_index)], cuts)


def _end(given: Any, otherwise: int, size: int) -> int:
    """Resolve one end of a slice as `slice.indices` does, which torch 2.11 does not compile."""
    if given is None:
        return otherwise
    index: int = given if isinstance(given, int) else operator.index(given)
    return max(index + size, 0) if index < 0 else min(index, size)


@rule(*operations("gather", "take_along_dim"))
def _gathered_by_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Each element of the result comes from the same position, except along one dimension."""
    if kwargs or len(args) != 3 or not isinstance(args[0], Tensor):
        return NotImplemented
    tensor, dim, index = args if NAMES[func] == "gather" else (args[0], args[2], args[1])
    if not isinstance(dim, int) or tensor.dim() != index.dim():
        return NotImplemented
    dim %= tensor.dim()
    same_shape = all(k == dim or tensor.shape[k] == index.shape[k] for k in range(tensor.dim()))
    if not same_shape or any(is_divided(each) and dim in each.cuts for each in (tensor, index)):
        return NotImplemented
    names = [k if k != dim else None for k in range(tensor.dim())]
    aligned = align_shardings((tensor, index), (names, names))
    if aligned is None:
        return NotImplemented
    return as_divided(torch.gather(aligned[0][0], dim, aligned[0][1]), aligned[1])
