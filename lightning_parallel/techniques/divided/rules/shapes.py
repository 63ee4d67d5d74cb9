"""Rules of operations that change the shape of a tensor, or the order of its dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from lightning_parallel.collectives.elements import Elements
from lightning_parallel.techniques.divided.alignment import align_shardings, as_divided
from lightning_parallel.techniques.divided.metadata import as_no_view, layout_is_unknown
from lightning_parallel.techniques.divided.table import NAMES, LocalCall, operations, rule
from lightning_parallel.techniques.divided.tensor import Divided, Wrapper, is_divided

# ---------------------------------------------------------------- one shape into another


SHAPED = frozenset((Tensor.view, Tensor.reshape))
COPYING = frozenset(("reshape", "reshape_as", "flatten", "ravel"))
"""Names of operations that copy if the memory layout of the full tensor does not allow a view."""


@rule(*operations("view", "reshape", "flatten", "ravel", "unflatten", "view_as", "reshape_as", "_unsafe_view"),
      remembered=True)  # fmt: skip
def _reshaped(func: Any, args: Any, kwargs: Any) -> Any:
    divided, *sizes = args
    of_dtype = any(type(each) is torch.dtype for each in (*sizes, *kwargs.values()))
    if not is_divided(divided) or not divided.numel() or of_dtype:
        return NotImplemented
    new_sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple) else sizes
    shape = cast(Sequence[int], new_sizes)
    if func not in SHAPED or kwargs or math.prod(new_sizes) != divided.numel() or -1 in new_sizes:
        # Torch itself computes the new shape, and raises for wrong arguments.
        shape = func(torch.empty(divided.shape, device="meta"), *map(_like, sizes), **kwargs).shape
    cuts: dict[int, Elements] = {}
    for dim, elements in divided.cuts.items():
        moved = _moved(divided.shape, dim, elements, shape)
        if moved is None or moved[0] in cuts:
            return NotImplemented
        cuts[moved[0]] = moved[1]
    local_shape = [cuts[dim].length if dim in cuts else size for dim, size in enumerate(shape)]
    if NAMES[func] in COPYING and layout_is_unknown(divided):
        return Divided(divided.own.reshape(local_shape).clone(), cuts)  # a graph drops a copy that nobody changes
    return LocalCall(Tensor.reshape, cuts, (local_shape,))


def _like(value: Any) -> Any:
    return torch.empty(value.shape, device="meta") if isinstance(value, Tensor) else value


def _moved(old: Sequence[int], dim: int, elements: Elements, new: Sequence[int]) -> tuple[int, Elements] | None:
    """Return the dimension of the new shape in which a sharded dimension ends up, with its elements there, or None.

    E.g. heads 0-1 of [8 tokens, 4 heads, 8] are features 0-15 of [8, 32], and back. None if the local elements are not
    some elements of one new dimension, as where ranks have parts of heads.
    """
    before, after = math.prod(old[:dim]), math.prod(old[dim + 1 :])  # `after`: distance of its elements in memory
    first = 1  # the product of the new sizes before this one
    for new_dim, size in enumerate(new):
        rest = math.prod(new[new_dim + 1 :])
        moved: Elements | None = None
        if (size > 1 or elements.size == 1) and after % rest == 0:
            moved = elements.grown(after // rest)  # merged with the dimensions after it
        elif (size > 1 or elements.size == 1) and rest % after == 0:
            moved = elements.shrunk(rest // after)  # groups of its elements became dimensions after it
        if moved is not None and moved.size:
            if size % moved.size == 0 and first * (size // moved.size) == before:
                return new_dim, moved.tiled(size // moved.size)
            if moved.size % size == 0 and first == before * (moved.size // size):
                untiled = moved.untiled(moved.size // size)
                if untiled is not None:
                    return new_dim, untiled
        first *= size
    return None


# ---------------------------------------------------------------- the order of dimensions


@rule(*operations("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "squeeze", "unsqueeze", "t",
                  "adjoint"), Tensor.T.__get__, Tensor.mT.__get__, remembered=True)  # type: ignore[attr-defined]  # fmt: skip
def _ordered(func: Any, args: Any, kwargs: Any) -> Any:
    divided = args[0]
    if not is_divided(divided):
        return NotImplemented
    # On a meta tensor of which each dimension has another size, the result shows where the dimensions go.
    sizes = [dim + 2 if size != 1 or dim in divided.cuts else 1 for dim, size in enumerate(divided.shape)]
    places = list(func(torch.empty(sizes, device="meta"), *args[1:], **kwargs).shape)
    cuts = {places.index(dim + 2): elements for dim, elements in divided.cuts.items()}
    if "squeeze" not in NAMES[func] or all(1 not in (each.size, each.length) for each in cuts.values()):
        return LocalCall(func, cuts)
    if any(elements.size == 1 for elements in cuts.values()):
        return NotImplemented
    # Here the local size of a dimension is 1, but the full size is not: keep the dimension.
    shape = list(func(torch.empty(divided.shape, device="meta"), *args[1:], **kwargs).shape)
    for dim, elements in cuts.items():
        shape[dim] = elements.length
    return Divided(divided.own.reshape(shape), cuts)


TURNING = ("transpose_", "swapaxes_", "swapdims_", "t_", "squeeze_", "unsqueeze_")
SHAPING = ("resize_", "resize_as_", "as_strided_", "set_")


@rule(*operations(*TURNING, *SHAPING))
def _itself_in_another_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """In-place change of shape or order of dimensions: the same object with another local shard."""
    divided, name = args[0], NAMES[func]
    if not isinstance(divided, Divided):
        return NotImplemented
    is_reorder = name in TURNING and divided.stored is None and isinstance(divided, Wrapper)
    viewed = divided.form.viewed if isinstance(divided, Wrapper) else []
    is_possible = is_reorder and not any(each.divided is divided for each in viewed)
    result = getattr(Tensor, name.removesuffix("_"))(*args, **kwargs) if is_possible else None
    if not isinstance(result, Wrapper) or not isinstance(divided, Wrapper):
        instead = name.removesuffix("_") if name in TURNING or name == "as_strided_" else "reshape"
        raise ValueError(
            f"{name} cannot change the shape {tuple(divided.shape)} of a divided tensor in place. Only the order of "
            "dimensions and those of size 1 can change, but not of parameters, in graphs of torch.compile, or while "
            f"views of the gathered tensor exist; write y = x.{instead}(...) and use y"
        )
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        func(*args, **kwargs)  # on the wrapper alone: the history is that of the local shard
    divided.own, divided.form = result.own, result.form
    divided.note_change()
    return divided


@rule(*operations("expand", "expand_as", "broadcast_to"), remembered=True)
def _expanded(func: Any, args: Any, kwargs: Any) -> Any:
    divided = args[0]
    if not is_divided(divided):
        return NotImplemented
    shape = func(torch.empty(divided.shape, device="meta"), *map(_like, args[1:]), **kwargs).shape
    added = len(shape) - divided.dim()
    cuts = {dim + added: elements for dim, elements in divided.cuts.items()}
    if any(shape[dim] != elements.size for dim, elements in cuts.items()):
        return NotImplemented
    return LocalCall(Tensor.expand, cuts, ([-1 if dim in cuts else size for dim, size in enumerate(shape)],))


@rule(*operations("repeat_interleave"))
def _repeated(func: Any, args: Any, kwargs: Any) -> Any:
    divided, times, dim = (*args, kwargs.get("repeats"), kwargs.get("dim"))[:3]
    dim = kwargs.get("dim", dim)
    if not is_divided(divided) or not isinstance(times, int) or not isinstance(dim, int) or "output_size" in kwargs:
        return NotImplemented
    dim %= divided.dim()
    cuts = {k: elements.grown(times) if k == dim else elements for k, elements in divided.cuts.items()}
    return Divided(as_no_view(torch.repeat_interleave(divided.own, times, dim)), cuts)


# ---------------------------------------------------------------- several tensors, and pieces of one


@rule(*operations("cat", "concat", "concatenate", "stack"))
def _one_after_the_other(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, dim = (*args, 0)[:2]
    dim = kwargs.get("dim", dim)
    if NAMES[func] == "stack":
        if len({each.dim() for each in tensors}) > 1:
            return NotImplemented
        tensors = [each.unsqueeze(dim) for each in tensors]
    tensors = [each for each in tensors if each.dim() != 1 or each.numel()] or tensors  # torch ignores empty vectors
    if "out" in kwargs or not isinstance(dim, int) or len({tensor.dim() for tensor in tensors}) > 1:
        return NotImplemented
    if len(tensors) == 1:
        return tensors[0].clone()
    dim %= tensors[0].dim()
    aligned = align_shardings(tensors, [[k if k != dim else None for k in range(tensors[0].dim())]] * len(tensors))
    return NotImplemented if aligned is None else as_divided(torch.cat(aligned[0], dim), aligned[1])


@rule(*operations("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_chunk", "unsafe_split"))
def _pieces(func: Any, args: Any, kwargs: Any) -> Any:
    divided = args[0]
    if not is_divided(divided):
        return NotImplemented
    drop = NAMES[func] == "unbind"
    position = 1 if drop else 2
    dim = kwargs.get("dim", args[position] if len(args) > position else 0) % divided.dim()
    if dim not in divided.cuts:
        cuts = {k - (drop and k > dim): elements for k, elements in divided.cuts.items()}
        return tuple([Divided(piece, cuts) for piece in func(divided.own, *args[1:], **kwargs)])
    if drop:
        return NotImplemented
    chunks = func(torch.empty(divided.shape, device="meta"), *args[1:], **kwargs)
    lengths = [piece.shape[dim] for piece in chunks]
    starts = list(accumulate(lengths, initial=0))
    if starts.pop() != divided.shape[dim]:  # chunks overlap, as with split indices that do not ascend
        starts = [piece.storage_offset() // chunks[0].stride(dim) for piece in chunks]
    return tuple([sliced(divided, dim, start, start + length) for start, length in zip(starts, lengths, strict=True)])


def sliced(divided: Divided, dim: int, start: int, stop: int) -> Divided:
    """Return the elements from `start` to before `stop` of a sharded dimension."""
    elements = divided.cuts[dim]
    first, last = elements.before(start), elements.before(stop)
    cuts = {k: each.cut(start, stop) if k == dim else each for k, each in divided.cuts.items()}
    return Divided(divided.own.narrow(dim, first, last - first), cuts)
