"""Operations that give a tensor another shape, or order its dimensions anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from lightning_parallel.collectives.elements import Elements
from lightning_parallel.techniques.divided.looks import hides_layout, no_view
from lightning_parallel.techniques.divided.meeting import as_divided, brought_together
from lightning_parallel.techniques.divided.table import NAMES, LocalCall, operations, rule
from lightning_parallel.techniques.divided.tensor import Divided, Wrapper, is_divided

# ---------------------------------------------------------------- one shape into another


SHAPED = frozenset((Tensor.view, Tensor.reshape))
COPYING = frozenset(("reshape", "reshape_as", "flatten", "ravel"))
"""The names of those that copy where the whole does not lie in memory so that a view would do."""


@rule(*operations("view", "reshape", "flatten", "ravel", "unflatten", "view_as", "reshape_as", "_unsafe_view"),
      remembered=True)  # fmt: skip
def _reshaped(func: Any, args: Any, kwargs: Any) -> Any:
    divided, *sizes = args
    of_dtype = any(type(each) is torch.dtype for each in (*sizes, *kwargs.values()))
    if not is_divided(divided) or not divided.numel() or of_dtype:
        return NotImplemented
    given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple) else sizes
    shape = cast(Sequence[int], given)
    if func not in SHAPED or kwargs or math.prod(given) != divided.numel() or -1 in given:
        # Torch itself says what shape comes out, and what is wrong with the arguments.
        shape = func(torch.empty(divided.shape, device="meta"), *map(_like, sizes), **kwargs).shape
    cuts: dict[int, Elements] = {}
    for dim, elements in divided.cuts.items():
        found = _moved(divided.shape, dim, elements, shape)
        if found is None or found[0] in cuts:
            return NotImplemented
        cuts[found[0]] = found[1]
    own = [cuts[dim].length if dim in cuts else size for dim, size in enumerate(shape)]
    if NAMES[func] in COPYING and hides_layout(divided):
        return Divided(divided.own.reshape(own).clone(), cuts)  # graphs leave out what nobody changes
    return LocalCall(Tensor.reshape, cuts, (own,))


def _like(value: Any) -> Any:
    return torch.empty(value.shape, device="meta") if isinstance(value, Tensor) else value


def _moved(old: Sequence[int], dim: int, elements: Elements, new: Sequence[int]) -> tuple[int, Elements] | None:
    """The dimension of the new shape in which the divided one ends up, and the elements there; None if in none.

    E.g. the heads 0-1 of [8 tokens, 4 heads, 8] are the features 0-15 of [8, 32], and back. None where what a rank has
    would not be some elements of one new dimension, as where ranks have parts of heads.
    """
    before, after = math.prod(old[:dim]), math.prod(old[dim + 1 :])  # `after`: how far apart elements lie in memory
    first = 1  # the product of the new sizes before this one
    for place, size in enumerate(new):
        rest = math.prod(new[place + 1 :])
        found: Elements | None = None
        if (size > 1 or elements.size == 1) and after % rest == 0:
            found = elements.grown(after // rest)  # it took in what comes behind it
        elif (size > 1 or elements.size == 1) and rest % after == 0:
            found = elements.shrunk(rest // after)  # groups of its elements became dimensions of their own
        if found is not None and found.size:
            if size % found.size == 0 and first * (size // found.size) == before:
                return place, found.tiled(size // found.size)
            if found.size % size == 0 and first == before * (found.size // size):
                untiled = found.untiled(found.size // size)
                if untiled is not None:
                    return place, untiled
        first *= size
    return None


# ---------------------------------------------------------------- the order of dimensions


@rule(*operations("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "squeeze", "unsqueeze", "t",
                  "adjoint"), Tensor.T.__get__, Tensor.mT.__get__, remembered=True)  # type: ignore[attr-defined]  # fmt: skip
def _ordered(func: Any, args: Any, kwargs: Any) -> Any:
    divided = args[0]
    if not is_divided(divided):
        return NotImplemented
    # In a tensor of the same number of dimensions, each of another size, one sees where they go.
    sizes = [dim + 2 if size != 1 or dim in divided.cuts else 1 for dim, size in enumerate(divided.shape)]
    places = list(func(torch.empty(sizes, device="meta"), *args[1:], **kwargs).shape)
    cuts = {places.index(dim + 2): elements for dim, elements in divided.cuts.items()}
    if "squeeze" not in NAMES[func] or all(1 not in (each.size, each.length) for each in cuts.values()):
        return LocalCall(func, cuts)
    if any(elements.size == 1 for elements in cuts.values()):
        return NotImplemented
    # This rank has one element of a dimension that stays, as the whole has more.
    shape = list(func(torch.empty(divided.shape, device="meta"), *args[1:], **kwargs).shape)
    for dim, elements in cuts.items():
        shape[dim] = elements.length
    return Divided(divided.own.reshape(shape), cuts)


TURNING = ("transpose_", "swapaxes_", "swapdims_", "t_", "squeeze_", "unsqueeze_")
SHAPING = ("resize_", "resize_as_", "as_strided_", "set_")


@rule(*operations(*TURNING, *SHAPING))
def _itself_in_another_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """The same object, of which the rank then has other elements, or the same ones in another order of dimensions."""
    divided, name = args[0], NAMES[func]
    if not isinstance(divided, Divided):
        return NotImplemented
    turns = name in TURNING and divided.stored is None and isinstance(divided, Wrapper)
    viewed = divided.form.viewed if isinstance(divided, Wrapper) else []
    may_turn = turns and not any(each.divided is divided for each in viewed)
    made = getattr(Tensor, name.removesuffix("_"))(*args, **kwargs) if may_turn else None
    if not isinstance(made, Wrapper) or not isinstance(divided, Wrapper):
        instead = name.removesuffix("_") if name in TURNING or name == "as_strided_" else "reshape"
        raise ValueError(
            f"{name} gives a tensor of shape {tuple(divided.shape)} that ranks divide another shape in place, which "
            "works only where dimensions change their order or have the size 1, and neither of a parameter, nor in a "
            "graph of torch.compile, nor where there are views of the gathered whole; write "
            f"y = x.{instead}(...) and use y"
        )
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        func(*args, **kwargs)  # its history is that of its own elements
    divided.own, divided.form = made.own, made.form
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
    return Divided(no_view(torch.repeat_interleave(divided.own, times, dim)), cuts)


# ---------------------------------------------------------------- several tensors, and pieces of one


@rule(*operations("cat", "concat", "concatenate", "stack"))
def _one_after_the_other(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, dim = (*args, 0)[:2]
    dim = kwargs.get("dim", dim)
    if NAMES[func] == "stack":
        if len({each.dim() for each in tensors}) > 1:
            return NotImplemented
        tensors = [each.unsqueeze(dim) for each in tensors]
    tensors = [each for each in tensors if each.dim() != 1 or each.numel()] or tensors  # torch leaves out [] too
    if "out" in kwargs or not isinstance(dim, int) or len({tensor.dim() for tensor in tensors}) > 1:
        return NotImplemented
    if len(tensors) == 1:
        return tensors[0].clone()
    dim %= tensors[0].dim()
    mine = brought_together(tensors, [[k if k != dim else None for k in range(tensors[0].dim())]] * len(tensors))
    return NotImplemented if mine is None else as_divided(torch.cat(mine[0], dim), mine[1])


@rule(*operations("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_chunk", "unsafe_split"))
def _pieces(func: Any, args: Any, kwargs: Any) -> Any:
    divided = args[0]
    if not is_divided(divided):
        return NotImplemented
    at = 1 if NAMES[func] == "unbind" else 2
    dim = kwargs.get("dim", args[at] if len(args) > at else 0) % divided.dim()
    if dim not in divided.cuts:
        lost = NAMES[func] == "unbind"
        cuts = {k - (lost and k > dim): elements for k, elements in divided.cuts.items()}
        return tuple([Divided(piece, cuts) for piece in func(divided.own, *args[1:], **kwargs)])
    if NAMES[func] == "unbind":
        return NotImplemented
    found = func(torch.empty(divided.shape, device="meta"), *args[1:], **kwargs)
    lengths = [piece.shape[dim] for piece in found]
    starts = list(accumulate(lengths, initial=0))
    if starts.pop() != divided.shape[dim]:  # pieces overlap, as those between places that do not ascend
        starts = [piece.storage_offset() // found[0].stride(dim) for piece in found]
    return tuple([sliced(divided, dim, start, start + length) for start, length in zip(starts, lengths, strict=True)])


def sliced(divided: Divided, dim: int, start: int, stop: int) -> Divided:
    """The elements from `start` to `stop` of a dimension that is divided."""
    elements = divided.cuts[dim]
    first, last = elements.before(start), elements.before(stop)
    cuts = {k: each.cut(start, stop) if k == dim else each for k, each in divided.cuts.items()}
    return Divided(divided.own.narrow(dim, first, last - first), cuts)
