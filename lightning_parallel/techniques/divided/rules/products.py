"""Rules of products: linear layers, matrix products, einsum, embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.techniques.divided.alignment import (
    align_shardings,
    aligned_local,
    as_divided,
    enter_once,
    gathered_once,
    in_dtype,
    reduce_partial,
)
from lightning_parallel.techniques.divided.metadata import as_no_view
from lightning_parallel.techniques.divided.table import LocalCall, by_name, rule
from lightning_parallel.techniques.divided.tensor import Divided, is_divided


@rule(F.linear, torch._C._nn.linear, remembered=True)
def _linear(func: Any, args: Any, kwargs: Any) -> Any:
    """X [..., in] @ weight [out, in].T + bias [out]; common layouts become a `LocalCall` in place of `_of_any`."""
    named = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
    x, weight, bias = named["input"], named["weight"], named.get("bias")
    if weight.dim() != 2 or not x.dim() or not (bias is None or bias.shape == weight.shape[:1]):
        return NotImplemented  # torch allows a weight that is a vector, and a bias that is broadcast
    if not is_divided(weight) or len(weight.cuts) > 1:
        return _of_any(x, weight, bias)
    ((dim, rows),) = weight.cuts.items()
    ranks, last = rows.ranks, x.dim() - 1

    def into_features(x: Tensor, weight: Divided, bias: Divided | None = None) -> Tensor:
        if not isinstance(x, Divided):
            full = enter_once(x, ranks, autocast_dtype(x))
        elif x.known is not None:  # nothing needs to be gathered
            product: Divided = _of_any(x, weight, bias)
            return product.own
        else:
            ((dim, elements),) = x.cuts.items()
            full = gathered_once(x, x.own, dim, elements, autocast_dtype(x.own))
        return F.linear(full, weight.own, None if bias is None else bias.own)

    def out_of_features(x: Divided, weight: Divided, bias: Tensor | None = None) -> Tensor:
        product = reduce_partial(F.linear(in_dtype(x.own, autocast_dtype(x.own)), weight.own), ranks, {})
        return product if bias is None else product + bias

    of_x = x.cuts if is_divided(x) else {}
    if dim == 0 and (bias is None or (is_divided(bias) and rows.same(bias.cuts.get(0)))):
        # column-parallel, from the full input or from a sequence that the same ranks shard
        of_sequence = len(of_x) == 1 and last not in of_x and next(iter(of_x.values())).ranks is ranks
        if not is_divided(x) or (of_sequence and not torch.compiler.is_dynamo_compiling()):
            return LocalCall(into_features, {last: rows}, takes_divided=True)
    if dim == 1 and len(of_x) == 1 and rows.same(of_x.get(last)):  # row-parallel, from the same features
        return LocalCall(out_of_features, None)
    return _of_any(x, weight, bias)


def _of_any(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    lead = list(range(x.dim() - 1))
    return _product(F.linear, (x, weight), ([*lead, "in"], ["out", "in"]), [*lead, "out"], bias)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes products; None outside of it."""
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)
def _matmul(func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs or len(args) != 2:
        return NotImplemented
    a, b = args
    if min(a.dim(), b.dim()) < 2:
        return NotImplemented
    dims = max(a.dim(), b.dim()) - 2
    leads = [
        [k if size != 1 else None for k, size in zip(range(dims - t.dim() + 2, dims), t.shape, strict=False)]
        for t in args
    ]
    return _product(
        torch.matmul, args, ([*leads[0], "row", "in"], [*leads[1], "in", "out"]), [*range(dims), "row", "out"]
    )


@rule(Tensor.__rmatmul__)
def _reflected(func: Any, args: Any, kwargs: Any) -> Any:
    return torch.matmul(args[1], args[0])


@rule(torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm)
def _added_product(func: Any, args: Any, kwargs: Any) -> Any:
    """Matrix product with something added to it, as beta * input + alpha * (mat1 @ mat2)."""
    named = {name.replace("batch", "mat"): value for name, value in kwargs.items()}
    operands = {**dict(zip(("input", "mat1", "mat2"), args, strict=False)), **named}
    beta, alpha = operands.pop("beta", 1), operands.pop("alpha", 1)
    if len(operands) != 3:
        return NotImplemented
    product = torch.matmul(operands["mat1"], operands["mat2"])
    product = product if alpha == 1 else product * alpha
    added = operands["input"] if beta == 1 else operands["input"] * beta
    return product if beta == 0 else product + added


@rule(torch.einsum)
def _einsum(func: Any, args: Any, kwargs: Any) -> Any:
    equation, *tensors = args
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        tensors = list(tensors[0])
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(tensors) > 2:
        return NotImplemented
    inputs, output = equation.replace(" ", "").split("->")
    labels = [list(each) for each in inputs.split(",")]
    sizes = {
        (name, size)
        for tensor, each in zip(tensors, labels, strict=True)
        for name, size in zip(each, tensor.shape, strict=True)
    }
    if any(len(set(each)) < len(each) for each in labels) or len(sizes) > len({name for name, _ in sizes}):
        return NotImplemented  # diagonals, and broadcast dimensions of size 1

    def run(*own: Tensor) -> Tensor:
        product = torch.einsum(equation, *own)
        return product if len(own) == 1 else as_no_view(product)  # of one tensor, a view if it only permutes

    return _product(run, tensors, labels, list(output))


def _product(run: Any, tensors: Any, names: Any, out: list[Any], bias: Any = None) -> Any:
    """Compute a sum of products over the dimensions that the result does not have.

    Args:
        run: the operation on plain tensors.
        tensors: the factors.
        names: of the dimensions of each factor; a name that `out` lacks is summed over.
        out: the names of the result's dimensions.
        bias: added to the result.

    Returns:
        The result, reduced over the ranks that shard a summed dimension; NotImplemented if factors cannot be aligned.
    """
    aligned = align_shardings(tensors, names, autocast_dtype(tensors[0]))
    if aligned is None:
        return NotImplemented
    local_tensors, elements = aligned
    reduced = [each for name, each in elements.items() if name not in out]
    cuts = {out.index(name): each for name, each in elements.items() if name in out}
    added, last = None, len(out) - 1
    if (
        bias is not None
        and not reduced
        and set(cuts) == {last}
        and (not is_divided(bias) or cuts[last].same(bias.cuts.get(0)))
    ):
        added = aligned_local(bias, [last], cuts)  # added by the local linear
    result = run(*local_tensors) if added is None else F.linear(local_tensors[0], local_tensors[1], added)
    result = as_divided(result, cuts)
    for each in reduced:
        summand, sharded = (result.own, result.cuts) if isinstance(result, Divided) else (result, {})
        result = reduce_partial(summand, each.ranks, sharded)
    return result if bias is None or added is not None else result + bias


@rule(F.embedding, named=True)
def _embedding(func: Any, args: Any, kwargs: Any) -> Any:
    named = by_name(func, args, kwargs)
    ids, weight, padding = named["input"], named["weight"], named["padding_idx"]
    if named["max_norm"] is not None or named["scale_grad_by_freq"] or named["sparse"]:
        return NotImplemented
    rows = weight.cuts.get(0) if is_divided(weight) else None
    aligned = align_shardings((ids, weight), (range(ids.dim()), ["rows", ids.dim()]))
    if aligned is None:
        return NotImplemented
    (own_ids, own_weight), cuts = aligned
    if rows is None:
        return as_divided(F.embedding(own_ids, own_weight, padding), cuts)
    if any(len(runs) > 1 for runs in rows.runs) or not rows.same(cuts.pop("rows", None)):
        return NotImplemented
    # Each rank looks up the ids whose rows it has, and takes zeros for the others; then the ranks sum.
    require_numbers(own_ids, rows.size, "The id", "rows in the embedding")
    start, stop = rows.own[0] if rows.own else (0, 0)
    here = (own_ids >= start) & (own_ids < stop)
    if start == stop:
        vectors = own_weight.sum() * 0 + own_weight.new_zeros(*own_ids.shape, own_weight.shape[1])
    else:
        padding = None if padding is None else padding % rows.size - start
        padding = padding if padding is not None and 0 <= padding < stop - start else None
        vectors = F.embedding((own_ids - start).masked_fill(~here, 0), own_weight, padding)
    return reduce_partial(vectors.masked_fill(~here[..., None], 0), rows.ranks, cuts)


def require_numbers(numbers: Tensor, size: int, what: str, among: str, counted: Tensor | None = None) -> None:
    """Raise IndexError if a number is not in [0, size); on a GPU the process is aborted, as by torch's own check.

    Args:
        numbers: indices of classes or rows.
        size: how many there are.
        what: names a number, for the error.
        among: names what there are `size` of, for the error.
        counted: which of the numbers count; None for all.
    """
    wrong = (numbers < 0) | (numbers >= size)
    if counted is not None:
        wrong &= counted
    if numbers.device.type == "cpu" and bool(wrong.any()):
        raise IndexError(f"{what} {int(numbers[wrong][0])} is out of bounds: there are {size} {among}")
    if numbers.device.type != "cpu":
        torch._assert_async(~wrong.any())
