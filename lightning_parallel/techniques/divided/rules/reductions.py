"""Operations along some dimensions: sums, maxima, softmax, norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.collectives.by_elements import total
from lightning_parallel.techniques.divided.meeting import as_divided, as_they_are, brought_together
from lightning_parallel.techniques.divided.table import NAMES, LocalCall, operations, rule
from lightning_parallel.techniques.divided.tensor import Divided, is_divided


def left_of(divided: Divided, gone: Sequence[int], keepdim: bool) -> dict[int, Any]:
    """The cuts of what a reduction leaves."""
    return {
        dim if keepdim else dim - sum(each < dim for each in gone): elements
        for dim, elements in divided.cuts.items()
        if dim not in gone
    }


@rule(*operations("sum", "mean"), remembered=True)
def _added_up(func: Any, args: Any, kwargs: Any) -> Any:
    given = {**dict(zip(("input", "dim", "keepdim"), args, strict=False)), **kwargs}
    divided, dim, keepdim = args[0], given.get("dim"), given.get("keepdim", False)
    if not is_divided(divided) or "out" in kwargs or len(args) > 3:
        return NotImplemented
    dims: Any = dim
    names_all = dim is None or (isinstance(dim, Sequence) and not len(dim))
    if names_all or isinstance(dim, int):
        dims = range(divided.dim()) if names_all else (dim,)
    gone = tuple(each % divided.dim() for each in dims)
    summed = [divided.cuts[each] for each in gone if each in divided.cuts]
    floats = (kwargs.get("dtype") or divided.dtype).is_floating_point
    if not summed and len(gone) < divided.dim() and (floats or NAMES[func] == "sum"):
        return LocalCall(func, left_of(divided, gone, keepdim))
    if NAMES[func] == "mean" and not floats:
        return NotImplemented
    made = torch.sum(divided.own, gone, keepdim, dtype=kwargs.get("dtype"))
    if NAMES[func] == "mean":
        made = made / math.prod([divided.shape[each] for each in gone])
    for elements in summed:
        made = total(made, elements.ranks)
    return as_divided(made, left_of(divided, gone, keepdim))


@rule(*operations("amax", "amin", "max", "min", "argmin", "prod", "all", "any", "var", "std", "var_mean", "std_mean",
                  "median", "mode", "norm", "count_nonzero", "nanmean", "nansum", "kthvalue"),
      torch.linalg.vector_norm)  # fmt: skip
def _of_each(func: Any, args: Any, kwargs: Any) -> Any:
    """Reductions over dimensions that are not divided."""
    divided = args[0]
    tensors = any(isinstance(each, Tensor) for each in (*args[1:], *kwargs.values()))
    if not is_divided(divided) or "out" in kwargs or tensors:
        return NotImplemented
    if not all(map(min, (elements.lengths for elements in divided.cuts.values()))):
        return NotImplemented  # torch has no extremes of nothing
    # On a tensor whose dimensions have different sizes one sees which are left; torch reads the arguments.
    first = max(divided.shape) + 1  # none is too small to have what is asked for, as a `kthvalue`
    sizes = [first + dim for dim in range(divided.dim())]
    left = func(torch.ones(sizes, dtype=divided.dtype, device="meta"), *args[1:], **kwargs)
    shape = list((left if isinstance(left, Tensor) else left[0]).shape)
    if any(sizes[dim] not in shape for dim in divided.cuts):
        return NotImplemented
    cuts = {shape.index(sizes[dim]): elements for dim, elements in divided.cuts.items()}
    made = func(divided.own, *args[1:], **kwargs)
    return Divided(made, cuts) if isinstance(made, Tensor) else type(made)([Divided(each, cuts) for each in made])


PLACES = {"topk": (2, -1), "sort": (1, -1), "argsort": (1, -1), "normalize": (2, 1), "glu": (1, -1), "roll": (2, None)}
"""Where the dimension stands among the arguments, and which one it is by default; for others (1, None)."""


@rule(*operations("_softmax", "_log_softmax", "cumsum", "cumprod", "flip", "roll", "sort", "argsort", "topk", "softmin",
                  "normalize", "logcumsumexp", "glu", "triu", "tril", "index_select"), remembered=True)  # fmt: skip
def _along(func: Any, args: Any, kwargs: Any) -> Any:
    """Operations along some dimensions, which must not be divided, and to which they may give other sizes."""
    divided = args[0]
    if not is_divided(divided) or "out" in kwargs or any(is_divided(each) for each in (*args[1:], *kwargs.values())):
        return NotImplemented
    name = NAMES[func]
    dim: Any
    place, dim = PLACES.get(name, (1, None))
    if name in ("triu", "tril"):
        dim = -2, -1
    elif name == "flip" and len(args) > 2:
        dim = args[1:]
    else:
        dim = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else dim))
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    if not all(isinstance(each, int) and each % divided.dim() not in divided.cuts for each in dims):
        return NotImplemented
    if name not in ("sort", "topk"):
        return LocalCall(func, divided.cuts)
    made = func(divided.own, *args[1:], **kwargs)
    return type(made)([Divided(each, divided.cuts) for each in made])


@rule(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm, remembered=True)
def _normed(func: Any, args: Any, kwargs: Any) -> Any:
    """Norms over the last dimensions; weights that meet other positions on every rank enter."""
    names = ("normalized_shape", "weight", "bias") if "layer" in NAMES[func] else ("normalized_shape", "weight")
    given = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    rest, normed = args[1 + len(names) :], len(given["normalized_shape"])
    divided, dims = args[0], args[0].dim()
    if not is_divided(divided) or any(dim >= dims - normed for dim in divided.cuts):
        return NotImplemented
    over = list(range(dims - normed, dims))
    affine = [name for name in names[1:] if given.get(name) is not None]
    if any(is_divided(given[name]) for name in affine):
        return NotImplemented
    tensors, labels = [divided, *(given[name] for name in affine)], [range(dims), *[over] * len(affine)]
    if (cuts := as_they_are(tensors, labels)) is not None:
        return LocalCall(func, cuts)
    mine = brought_together(tensors, labels)
    if mine is None:
        return NotImplemented
    (own, *weights), cuts = mine
    given.update(zip(affine, weights, strict=True))
    return as_divided(func(own, *(given.pop(name, None) for name in names), *rest, **given), cuts)
