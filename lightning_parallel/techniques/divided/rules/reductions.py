"""Rules of operations along some dimensions: sums, maxima, softmax, norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.collectives.conjugate_collectives import total
from lightning_parallel.techniques.divided.alignment import align_shardings, as_divided, shared_sharding
from lightning_parallel.techniques.divided.table import NAMES, LocalCall, operations, rule
from lightning_parallel.techniques.divided.tensor import Divided, is_divided


def cuts_after_reduction(divided: Divided, gone: Sequence[int], keepdim: bool) -> dict[int, Any]:
    """Return the cuts of a reduction's result: for `gone` (1,), {0: a, 2: b} becomes {0: a, 1: b} without `keepdim`."""
    return {
        dim if keepdim else dim - sum(each < dim for each in gone): elements
        for dim, elements in divided.cuts.items()
        if dim not in gone
    }


@rule(*operations("sum", "mean"), remembered=True)
def _added_up(func: Any, args: Any, kwargs: Any) -> Any:
    named = {**dict(zip(("input", "dim", "keepdim"), args, strict=False)), **kwargs}
    divided, dim, keepdim = args[0], named.get("dim"), named.get("keepdim", False)
    if not is_divided(divided) or "out" in kwargs or len(args) > 3:
        return NotImplemented
    dims: Any = dim
    names_all = dim is None or (isinstance(dim, Sequence) and not len(dim))
    if names_all or isinstance(dim, int):
        dims = range(divided.dim()) if names_all else (dim,)
    gone = tuple(each % divided.dim() for each in dims)
    reduced = [divided.cuts[each] for each in gone if each in divided.cuts]
    floats = (kwargs.get("dtype") or divided.dtype).is_floating_point
    if not reduced and len(gone) < divided.dim() and (floats or NAMES[func] == "sum"):
        return LocalCall(func, cuts_after_reduction(divided, gone, keepdim))
    if NAMES[func] == "mean" and not floats:
        return NotImplemented
    result = torch.sum(divided.own, gone, keepdim, dtype=kwargs.get("dtype"))
    if NAMES[func] == "mean":
        result = result / math.prod([divided.shape[each] for each in gone])
    for elements in reduced:
        result = total(result, elements.ranks)
    return as_divided(result, cuts_after_reduction(divided, gone, keepdim))


@rule(*operations("amax", "amin", "max", "min", "argmin", "prod", "all", "any", "var", "std", "var_mean", "std_mean",
                  "median", "mode", "norm", "count_nonzero", "nanmean", "nansum", "kthvalue"),
      torch.linalg.vector_norm)  # fmt: skip
def _of_each(func: Any, args: Any, kwargs: Any) -> Any:
    """Reductions over dimensions that are not sharded."""
    divided = args[0]
    tensors = any(isinstance(each, Tensor) for each in (*args[1:], *kwargs.values()))
    if not is_divided(divided) or "out" in kwargs or tensors:
        return NotImplemented
    if not all(map(min, (elements.lengths for elements in divided.cuts.values()))):
        return NotImplemented  # torch has no maximum or minimum of no elements
    # On a meta tensor whose dimensions all differ in size, the result shows which are left; torch reads the arguments.
    first = max(divided.shape) + 1  # large enough for any argument, such as the k of `kthvalue`
    sizes = [first + dim for dim in range(divided.dim())]
    reduced = func(torch.ones(sizes, dtype=divided.dtype, device="meta"), *args[1:], **kwargs)
    shape = list((reduced if isinstance(reduced, Tensor) else reduced[0]).shape)
    if any(sizes[dim] not in shape for dim in divided.cuts):
        return NotImplemented
    cuts = {shape.index(sizes[dim]): elements for dim, elements in divided.cuts.items()}
    out = func(divided.own, *args[1:], **kwargs)
    return Divided(out, cuts) if isinstance(out, Tensor) else type(out)([Divided(each, cuts) for each in out])


PLACES = {"topk": (2, -1), "sort": (1, -1), "argsort": (1, -1), "normalize": (2, 1), "glu": (1, -1), "roll": (2, None)}
"""Position of the `dim` argument, and its default; (1, None) for other operations."""


@rule(*operations("_softmax", "_log_softmax", "cumsum", "cumprod", "flip", "roll", "sort", "argsort", "topk", "softmin",
                  "normalize", "logcumsumexp", "glu", "triu", "tril", "index_select"), remembered=True)  # fmt: skip
def _along(func: Any, args: Any, kwargs: Any) -> Any:
    """Operations along dimensions that are not sharded; they may change the sizes of these."""
    divided = args[0]
    if not is_divided(divided) or "out" in kwargs or any(is_divided(each) for each in (*args[1:], *kwargs.values())):
        return NotImplemented
    name = NAMES[func]
    dim: Any
    position, dim = PLACES.get(name, (1, None))
    if name in ("triu", "tril"):
        dim = -2, -1
    elif name == "flip" and len(args) > 2:
        dim = args[1:]
    else:
        dim = kwargs.get("dim", kwargs.get("dims", args[position] if len(args) > position else dim))
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    if not all(isinstance(each, int) and each % divided.dim() not in divided.cuts for each in dims):
        return NotImplemented
    if name not in ("sort", "topk"):
        return LocalCall(func, divided.cuts)
    results = func(divided.own, *args[1:], **kwargs)
    return type(results)([Divided(each, divided.cuts) for each in results])


@rule(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm, remembered=True)
def _normed(func: Any, args: Any, kwargs: Any) -> Any:
    """Norms over the last dimensions; weights are `entered`, as each rank uses them for other positions."""
    names = ("normalized_shape", "weight", "bias") if "layer" in NAMES[func] else ("normalized_shape", "weight")
    named = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    rest, normed = args[1 + len(names) :], len(named["normalized_shape"])
    divided, dims = args[0], args[0].dim()
    if not is_divided(divided) or any(dim >= dims - normed for dim in divided.cuts):
        return NotImplemented
    normed_dims = list(range(dims - normed, dims))
    affine = [name for name in names[1:] if named.get(name) is not None]
    if any(is_divided(named[name]) for name in affine):
        return NotImplemented
    tensors, labels = [divided, *(named[name] for name in affine)], [range(dims), *[normed_dims] * len(affine)]
    if (cuts := shared_sharding(tensors, labels)) is not None:
        return LocalCall(func, cuts)
    aligned = align_shardings(tensors, labels)
    if aligned is None:
        return NotImplemented
    (own, *weights), cuts = aligned
    named.update(zip(affine, weights, strict=True))
    return as_divided(func(own, *(named.pop(name, None) for name in names), *rest, **named), cuts)
