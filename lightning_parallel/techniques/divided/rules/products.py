"""Products: linear maps, matrix products, einsum, embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.techniques.divided.looks import no_view
from lightning_parallel.techniques.divided.meeting import (
    as_divided,
    brought_together,
    gathered_once,
    in_dtype,
    met,
    own_part,
    summed_up,
)
from lightning_parallel.techniques.divided.table import LocalCall, by_name, rule
from lightning_parallel.techniques.divided.tensor import Divided, is_divided


@rule(F.linear, torch._C._nn.linear, remembered=True)
def _linear(func: Any, args: Any, kwargs: Any) -> Any:
    """X [..., in] @ weight [out, in].T + bias [out]; the usual maps are calls that `_of_any` would compute alike."""
    x, weight, bias = (
        (*args, kwargs.get("bias"))[:3] if len(args) > 1 else (args[0], kwargs["weight"], kwargs.get("bias"))
    )
    if weight.dim() != 2 or not x.dim() or not (bias is None or bias.shape == weight.shape[:1]):
        return NotImplemented  # a weight may be a vector, a bias anything that can be added to the result
    if not is_divided(weight) or len(weight.cuts) > 1:
        return _of_any(x, weight, bias)
    ((dim, rows),) = weight.cuts.items()
    ranks, last = rows.ranks, x.dim() - 1

    def into_features(x: Tensor, weight: Divided, bias: Divided | None = None) -> Tensor:
        if not isinstance(x, Divided):
            whole = met(x, ranks, autocast_dtype(x))
        elif x.known is not None:  # nothing need be gathered
            made: Divided = _of_any(x, weight, bias)
            return made.own
        else:
            ((dim, elements),) = x.cuts.items()
            whole = gathered_once(x, x.own, dim, elements, autocast_dtype(x.own))
        return F.linear(whole, weight.own, None if bias is None else bias.own)

    def out_of_features(x: Divided, weight: Divided, bias: Tensor | None = None) -> Tensor:
        made = summed_up(F.linear(in_dtype(x.own, autocast_dtype(x.own)), weight.own), ranks, {})
        return made if bias is None else made + bias

    of_x = x.cuts if is_divided(x) else {}
    if dim == 0 and (bias is None or (is_divided(bias) and rows.same(bias.cuts.get(0)))):
        # into features, from the whole or from a sequence of which these ranks have parts
        of_sequence = len(of_x) == 1 and last not in of_x and next(iter(of_x.values())).ranks is ranks
        if not is_divided(x) or (of_sequence and not torch.compiler.is_dynamo_compiling()):
            return LocalCall(into_features, {last: rows}, of_themselves=True)
    if dim == 1 and len(of_x) == 1 and rows.same(of_x.get(last)):  # out of the same features
        return LocalCall(out_of_features, None)
    return _of_any(x, weight, bias)


def _of_any(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    lead = list(range(x.dim() - 1))
    return _product(F.linear, (x, weight), ([*lead, "in"], ["out", "in"]), [*lead, "out"], bias)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype in which autocast has products computed; None outside of it."""
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
    """A product with something added to it, as beta * input + alpha * (mat1 @ mat2)."""
    named = {name.replace("batch", "mat"): value for name, value in kwargs.items()}
    given = {**dict(zip(("input", "mat1", "mat2"), args, strict=False)), **named}
    beta, alpha = given.pop("beta", 1), given.pop("alpha", 1)
    if len(given) != 3:
        return NotImplemented
    made = torch.matmul(given["mat1"], given["mat2"])
    made = made if alpha == 1 else made * alpha
    added = given["input"] if beta == 1 else given["input"] * beta
    return made if beta == 0 else made + added


@rule(torch.einsum)
def _einsum(func: Any, args: Any, kwargs: Any) -> Any:
    equation, *tensors = args
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        tensors = list(tensors[0])
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(tensors) > 2:
        return NotImplemented
    inputs, output = equation.replace(" ", "").split("->")
    names = [list(each) for each in inputs.split(",")]
    sizes = {
        (name, size)
        for tensor, each in zip(tensors, names, strict=True)
        for name, size in zip(each, tensor.shape, strict=True)
    }
    if any(len(set(each)) < len(each) for each in names) or len(sizes) > len({name for name, _ in sizes}):
        return NotImplemented  # diagonals, and sizes of 1 that stand for others

    def run(*own: Tensor) -> Tensor:
        made = torch.einsum(equation, *own)
        return made if len(own) == 1 else no_view(made)  # of one, a view if it only orders dimensions

    return _product(run, tensors, names, list(output))


def _product(run: Any, tensors: Any, names: Any, out: list[Any], bias: Any = None) -> Any:
    """A sum of products over the dimensions that the result does not have.

    Args:
        run: the operation, for plain tensors.
        tensors: what is multiplied.
        names: of the dimensions of each; over a name that `out` lacks is summed.
        out: the names of the result's dimensions.
        bias: added to the result.

    Returns:
        The result, summed over the ranks that divide what is summed over; NotImplemented if the tensors cannot meet.
    """
    mine = brought_together(tensors, names, autocast_dtype(tensors[0]))
    if mine is None:
        return NotImplemented
    own, elements = mine
    over = [each for name, each in elements.items() if name not in out]
    cuts = {out.index(name): each for name, each in elements.items() if name in out}
    added, last = None, len(out) - 1
    if (
        bias is not None
        and not over
        and set(cuts) == {last}
        and (not is_divided(bias) or cuts[last].same(bias.cuts.get(0)))
    ):
        added = own_part(bias, [last], cuts)  # the product itself adds it
    made = run(*own) if added is None else F.linear(own[0], own[1], added)
    made = as_divided(made, cuts)
    for each in over:
        summand, rest = (made.own, made.cuts) if isinstance(made, Divided) else (made, {})
        made = summed_up(summand, each.ranks, rest)
    return made if bias is None or added is not None else made + bias


@rule(F.embedding, named=True)
def _embedding(func: Any, args: Any, kwargs: Any) -> Any:
    given = by_name(func, args, kwargs)
    ids, weight, padding = given["input"], given["weight"], given["padding_idx"]
    if given["max_norm"] is not None or given["scale_grad_by_freq"] or given["sparse"]:
        return NotImplemented
    rows = weight.cuts.get(0) if is_divided(weight) else None
    mine = brought_together((ids, weight), (range(ids.dim()), ["rows", ids.dim()]))
    if mine is None:
        return NotImplemented
    (own_ids, own_weight), cuts = mine
    if rows is None:
        return as_divided(F.embedding(own_ids, own_weight, padding), cuts)
    if any(len(runs) > 1 for runs in rows.runs) or not rows.same(cuts.pop("rows", None)):
        return NotImplemented
    # Each rank looks up the ids of rows that it has, zeros stand for others, and ranks sum.
    require_numbers(own_ids, rows.size, "The id", "rows in the embedding")
    start, stop = rows.own[0] if rows.own else (0, 0)
    here = (own_ids >= start) & (own_ids < stop)
    if start == stop:
        found = own_weight.sum() * 0 + own_weight.new_zeros(*own_ids.shape, own_weight.shape[1])
    else:
        padding = None if padding is None else padding % rows.size - start
        padding = padding if padding is not None and 0 <= padding < stop - start else None
        found = F.embedding((own_ids - start).masked_fill(~here, 0), own_weight, padding)
    return summed_up(found.masked_fill(~here[..., None], 0), rows.ranks, cuts)


def require_numbers(numbers: Tensor, size: int, what: str, among: str, counted: Tensor | None = None) -> None:
    """Raises IndexError for a number that is not one of `size`; on a GPU the process ends, as with torch's own check.

    Args:
        numbers: of classes or rows.
        size: how many there are.
        what: the numbers are.
        among: what there are `size` of.
        counted: which of the numbers count, by default all.
    """
    wrong = (numbers < 0) | (numbers >= size)
    if counted is not None:
        wrong &= counted
    if numbers.device.type == "cpu" and bool(wrong.any()):
        raise IndexError(f"{what} {int(numbers[wrong][0])} is out of bounds: there are {size} {among}")
    if numbers.device.type != "cpu":
        torch._assert_async(~wrong.any())
