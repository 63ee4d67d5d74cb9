"""Pairs of collectives that are each other's gradient, between whole tensors and the elements that ranks have of them.

One law holds for all that ranks have: the gradient of a tensor that they have alike is complete on each of them; that
of elements which they have divided is complete on the rank that has them.

| of the first of each pair | forward | backward |
|---|---|---|
| `entered` ⇄ `total` | nothing | all_reduce |
| `part` ⇄ `joined` | nothing | all_gather |
| `gathered` ⇄ `total_part` | all_gather | reduce_scatter |

A backward pass that makes a graph of its own (`create_graph=True`) runs the other one of a pair as a function of
autograd, so that it can be differentiated again: by the same law, for what goes backward is alike, divided, or a
summand, as what went forward was.

Source: M. Shoeybi et al., Megatron-LM, 2019 (f and g); V. Korthikanti et al., MLSys 2023 (with a split sequence).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from lightning_parallel.collectives.elements import Elements, Ranks
from lightning_parallel.collectives.functional import parts_of_all, result, scattered, summed


def entered(x: Tensor, ranks: Ranks) -> Tensor:
    """The tensor itself, alike on all, from which each computes another part of what follows. Gradients are summed."""
    return _mapped(x, "entered", ranks)


def counted(x: Tensor, factor: float) -> Tensor:
    """The tensor itself, whose gradient counts `factor` times."""
    return _mapped(x, "counted", factor)


def becomes_mean(x: Any, ranks: Ranks) -> bool:
    """Whether a tensor is a parameter whose gradients become means over these ranks when the step ends; notes it."""
    if torch.compiler.is_dynamo_compiling() or type(x) is not nn.Parameter or ranks.name != "tp":
        return False
    path = vars(x).get("_replicated_path")
    if path is not None:
        ranks.met.add(path)
    return path is not None


def averaged_later(x: Tensor, ranks: Ranks) -> Tensor:
    """A parameter that each rank uses for its own elements, and whose gradients become means when a step ends.

    What a rank computed a summand of counts as often as there are ranks: the mean is the sum. Uses that all ranks have
    alike need no such thing. In a backward pass of the user's own, as `torch.autograd.grad` within the step, it is
    summed at once: nobody does so later, and a mean of equal ones is the same.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    if torch.compiler.is_dynamo_compiling():  # whose graphs are the same for all backward passes
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
    node.register_prehook(average_later)  # half the cost of a function of autograd
    return use


def total(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of what ranks computed, used alike by all. Gradients pass. ⇄ `entered`."""
    return _mapped(x, "total", ranks)


def part(x: Tensor, dim: int, elements: Elements) -> Tensor:
    """This rank's elements of a tensor that all have alike. ⇄ `joined`."""
    return _mapped(x, "part", dim, elements)


def joined(own: Tensor, dim: int, elements: Elements) -> Tensor:
    """The whole of what ranks have divided, used alike by all. ⇄ `part`."""
    return _mapped(own, "joined", dim, elements)


def gathered(own: Tensor, dim: int, elements: Elements) -> Tensor:
    """The whole of what ranks have divided, of which each computes another part of what follows. ⇄ `total_part`."""
    return _mapped(own, "gathered", dim, elements)


def total_part(x: Tensor, dim: int, elements: Elements) -> Tensor:
    """This rank's elements of the sum of what ranks computed. ⇄ `gathered`."""
    return _mapped(x, "total_part", dim, elements)


OPPOSITES = {"entered": "total", "part": "joined", "gathered": "total_part"}
OPPOSITES |= {back: ahead for ahead, back in OPPOSITES.items()} | {"counted": "counted"}
"""The name of the gradient of each map."""


def _mapped(x: Tensor, name: str, *where: Any) -> Tensor:
    if torch.compiler.is_dynamo_compiling():
        traced: Tensor = _Map.apply(x, name, *where)  # type: ignore[no-untyped-call]
        return traced
    # Without what `Function.apply` looks for first, for it is not here: defaults of a `setup_context`, and transforms.
    made: Tensor = super(Function, _Map).apply(x, name, *where)  # type: ignore[no-untyped-call]
    return made


class _Map(Function):
    """A linear map, by its name and where it acts: over ranks, or along a dimension; backward runs its opposite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, first: Any, *rest: Any) -> Tensor:
        # Without a gradient, compilers take a call of one value more than there are parameters for one without `ctx`,
        # so that `*where` would shift what it gets.
        ctx.opposite, ctx.where = OPPOSITES[name], (first, *rest)
        if name in ("entered", "counted"):  # a function of autograd must not return the very tensor that it got
            return x.view_as(x)
        return result(summed(x, first.group) if name == "total" else ALONG[name](x, first, *rest))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        name, where = ctx.opposite, ctx.where
        if name == "counted":
            gradient = gradient * where[0]
        elif torch.is_grad_enabled():  # create_graph=True: what goes backward has a gradient of its own
            gradient = _mapped(gradient, name, *where)
        elif name == "total":
            gradient = summed(gradient, where[0].group)
        elif name != "entered":
            gradient = ALONG[name](gradient, *where)
        return gradient, None, *[None] * len(where)


# ---------------------------------------------------------------- without gradients of their own


def whole_of(own: Tensor, dim: int, elements: Elements) -> Tensor:
    """The whole of what ranks have divided."""
    if elements.even:
        whole = parts_of_all(own, elements.ranks.group).movedim(0, dim).flatten(dim, dim + 1)
        return whole.contiguous()  # where parts have one element there, flattening copied nothing
    rows, missing = own.movedim(dim, 0), elements.longest - elements.length
    if missing:
        # one operation: zeros of their own would be real where rows have a shape only, and be sent on this rank alone
        rows = torch.constant_pad_nd(rows, (0, 0) * (rows.dim() - 1) + (0, missing))
    rows = parts_of_all(rows, elements.ranks.group).flatten(0, 1)  # [ranks x longest, ...]
    return rows.index_select(0, elements.numbers("order", own.device)).movedim(0, dim).contiguous()


def part_of_sum(x: Tensor, dim: int, elements: Elements) -> Tensor:
    """This rank's elements of the sum of what ranks computed."""
    ranks = elements.ranks
    if elements.even:
        parts = torch.unflatten(x, dim, (ranks.count, -1))
        return scattered(parts.movedim(dim, 0), ranks.group)
    rows = x.movedim(dim, 0).index_select(0, elements.numbers("of_all", x.device).clamp(max=elements.size - 1))
    own = scattered(rows.view(ranks.count, len(rows) // ranks.count, *rows.shape[1:]), ranks.group)
    return own[: elements.length].movedim(0, dim).contiguous()


def _own_part(x: Tensor, dim: int, elements: Elements) -> Tensor:
    return elements.take(x, dim).contiguous()


ALONG = {"part": _own_part, "joined": whole_of, "gathered": whole_of, "total_part": part_of_sum}
"""What maps along a dimension compute, without a gradient."""
