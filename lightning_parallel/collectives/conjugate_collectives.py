"""Pairs of differentiable collectives that are each other's gradient, between full tensors and the ranks' elements.

One invariant holds for all tensors: the gradient of a replicated tensor is complete on every rank; the gradient of a
sharded tensor is complete on the rank that has the elements.

| first of the pair | its forward | its backward |
|---|---|---|
| `entered` ⇄ `total` | nothing | all_reduce |
| `part` ⇄ `joined` | nothing | all_gather |
| `gathered` ⇄ `total_part` | all_gather | reduce_scatter |

A backward pass with `create_graph=True` runs the other function of the pair as an autograd.Function, so that it can be
differentiated again. The invariant covers this: the tensors of backward are replicated, sharded or partial as those of
forward are.

Source: M. Shoeybi et al., Megatron-LM, 2019 (f and g); V. Korthikanti et al., MLSys 2023 (with a split sequence).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from lightning_parallel.collectives.elements import Elements, Ranks
from lightning_parallel.collectives.functional import all_gather_stacked, reduce_scatter_row, result, summed


def entered(x: Tensor, ranks: Ranks) -> Tensor:
    """Return `x`, replicated, from which each rank computes another part; sum its gradient in backward. ⇄ `total`."""
    return _mapped(x, "entered", ranks)


def counted(x: Tensor, factor: float) -> Tensor:
    """Return `x`; its gradient is multiplied by `factor`."""
    return _mapped(x, "counted", factor)


def has_deferred_average(x: Any, ranks: Ranks) -> bool:
    """Return whether `x` is a parameter whose gradients are averaged over `tp` when the step ends; note it."""
    if torch.compiler.is_dynamo_compiling() or type(x) is not nn.Parameter or ranks.name != "tp":
        return False
    path = vars(x).get("_replicated_path")
    if path is not None:
        ranks.met.add(path)
    return path is not None


def defer_gradient_average(x: Tensor, ranks: Ranks) -> Tensor:
    """Return a replicated parameter that ranks use for their local elements, its gradient averaged when the step ends.

    Here its partial gradient is multiplied by the number of ranks: then the mean over ranks is the sum. Uses that are
    the same on all ranks need no factor. In a backward pass that the user's step runs itself, as `torch.autograd.grad`,
    the gradient is summed at once: nothing reduces it later, and the mean of equal gradients is the same.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    if torch.compiler.is_dynamo_compiling():  # a graph is the same for all backward passes
        return counted(x, ranks.count)

    def average_later(gradients: tuple[Tensor | None]) -> tuple[Tensor] | None:
        (gradient,) = gradients
        if gradient is None:
            return None
        if ranks.reduces_later:
            return (gradient * ranks.count,)
        return (total(gradient, ranks) if torch.is_grad_enabled() else summed(gradient, ranks.group),)

    use = x.view_as(x)
    node: Any = use.grad_fn
    node.register_prehook(average_later)  # half the cost of an autograd.Function
    return use


def total(x: Tensor, ranks: Ranks) -> Tensor:
    """Sum the ranks' partial tensors; the sum is replicated. Its gradient is passed on unchanged. ⇄ `entered`."""
    return _mapped(x, "total", ranks)


def part(x: Tensor, dim: int, elements: Elements) -> Tensor:
    """Return this rank's elements of a replicated tensor. ⇄ `joined`."""
    return _mapped(x, "part", dim, elements)


def joined(own: Tensor, dim: int, elements: Elements) -> Tensor:
    """Gather the full tensor, with which all ranks compute the same. ⇄ `part`."""
    return _mapped(own, "joined", dim, elements)


def gathered(own: Tensor, dim: int, elements: Elements) -> Tensor:
    """Gather the full tensor, from which each rank computes another part. ⇄ `total_part`."""
    return _mapped(own, "gathered", dim, elements)


def total_part(x: Tensor, dim: int, elements: Elements) -> Tensor:
    """Sum the ranks' partial tensors and return this rank's elements of the sum. ⇄ `gathered`."""
    return _mapped(x, "total_part", dim, elements)


OPPOSITES = {"entered": "total", "part": "joined", "gathered": "total_part"}
OPPOSITES |= {second: first for first, second in OPPOSITES.items()} | {"counted": "counted"}
"""For each map the name of the map that computes its gradient."""


def _mapped(x: Tensor, name: str, *where: Any) -> Tensor:
    if torch.compiler.is_dynamo_compiling():
        traced: Tensor = _Map.apply(x, name, *where)  # type: ignore[no-untyped-call]
        return traced
    # Skips what `Function.apply` checks first and is not used here: defaults of a `setup_context`, and transforms.
    output: Tensor = super(Function, _Map).apply(x, name, *where)  # type: ignore[no-untyped-call]
    return output


class _Map(Function):
    """Linear map, given by its name and where it acts: over ranks, or along a dimension. Backward runs its opposite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, first: Any, *rest: Any) -> Tensor:
        # Without a gradient, Dynamo drops `ctx` from a call with one argument more than `forward` has parameters:
        # `*where` in place of `first, *rest` would shift the arguments.
        ctx.opposite, ctx.where = OPPOSITES[name], (first, *rest)
        if name in ("entered", "counted"):  # an autograd.Function must not return its input itself
            return x.view_as(x)
        return result(summed(x, first.group) if name == "total" else ALONG[name](x, first, *rest))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        name, where = ctx.opposite, ctx.where
        if name == "counted":
            gradient = gradient * where[0]
        elif torch.is_grad_enabled():  # create_graph=True: the gradient is differentiated again
            gradient = _mapped(gradient, name, *where)
        elif name == "total":
            gradient = summed(gradient, where[0].group)
        elif name != "entered":
            gradient = ALONG[name](gradient, *where)
        return gradient, None, *[None] * len(where)


# ---------------------------------------------------------------- without gradients


def all_gather_elements(own: Tensor, dim: int, elements: Elements) -> Tensor:
    """Gather the full tensor from the ranks' elements along `dim`. Collective over `elements.ranks`."""
    if elements.even:
        full = all_gather_stacked(own, elements.ranks.group).movedim(0, dim).flatten(dim, dim + 1)
        return full.contiguous()  # where each rank has one element, flattening copied nothing
    rows, missing = own.movedim(dim, 0), elements.longest - elements.length  # [length, ...]
    if missing:
        # one operation: separate zeros would be real where rows are on meta, and only this rank would send them
        rows = torch.constant_pad_nd(rows, (0, 0) * (rows.dim() - 1) + (0, missing))
    rows = all_gather_stacked(rows, elements.ranks.group).flatten(0, 1)  # [ranks x longest, ...]
    return rows.index_select(0, elements.numbers("order", own.device)).movedim(0, dim).contiguous()


def reduce_scatter_elements(x: Tensor, dim: int, elements: Elements) -> Tensor:
    """Sum the ranks' tensors and return this rank's elements of the sum. Collective over `elements.ranks`."""
    ranks = elements.ranks
    if elements.even:
        parts = torch.unflatten(x, dim, (ranks.count, -1))  # [..., ranks, length, ...]
        return reduce_scatter_row(parts.movedim(dim, 0), ranks.group)
    rows = x.movedim(dim, 0).index_select(0, elements.numbers("of_all", x.device).clamp(max=elements.size - 1))
    shard = reduce_scatter_row(
        rows.view(ranks.count, len(rows) // ranks.count, *rows.shape[1:]), ranks.group
    )  # [longest, ...]
    return shard[: elements.length].movedim(0, dim).contiguous()


def _own_part(x: Tensor, dim: int, elements: Elements) -> Tensor:
    return elements.take(x, dim).contiguous()


ALONG = {
    "part": _own_part,
    "joined": all_gather_elements,
    "gathered": all_gather_elements,
    "total_part": reduce_scatter_elements,
}
"""The maps along a dimension, by name: their forward without a gradient."""
