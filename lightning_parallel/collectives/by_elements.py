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

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from lightning_parallel.collectives.elements import Elements, Ranks
from lightning_parallel.collectives.functional import (
    joined_parts,
    part_of_total,
    parts_of_all,
    result,
    scattered,
    summed,
)


def entered(x: Tensor, ranks: Ranks) -> Tensor:
    """The tensor itself, alike on all, from which each computes another part of what follows. Gradients are summed."""
    return _apply(_Enter, x, ranks)


def counted(x: Tensor, factor: float) -> Tensor:
    """The tensor itself, whose gradient counts `factor` times."""
    return _apply(_Count, x, factor)


def becomes_mean(x: Any, ranks: Ranks) -> bool:
    """Whether a tensor is a parameter whose gradients become means over these ranks when the step ends; notes it."""
    if torch.compiler.is_dynamo_compiling() or type(x) is not nn.Parameter or ranks.name != "tp":
        return False
    path = vars(x).get("_replicated_path")
    if path is not None:
        ranks.met[path] = None
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
    use = x.view_as(x)
    node: Any = use.grad_fn
    node.register_prehook(partial(_average_later, ranks))  # half the cost of a function of autograd
    return use


def _average_later(ranks: Ranks, gradients: tuple[Tensor | None]) -> tuple[Tensor] | None:
    (gradient,) = gradients
    if gradient is None:
        return None
    if ranks.reduces_later:
        return (gradient * ranks.count,)
    return (total(gradient, ranks) if torch.is_grad_enabled() else summed(gradient, ranks.group),)


def total(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of what ranks computed, used alike by all. Gradients pass. ⇄ `entered`."""
    return _apply(_Total, x, ranks)


def part(x: Tensor, dim: int, elements: Elements) -> Tensor:
    """This rank's elements of a tensor that all have alike. ⇄ `joined`."""
    return _apply(_Part, x, dim, elements)


def joined(own: Tensor, dim: int, elements: Elements) -> Tensor:
    """The whole of what ranks have divided, used alike by all. ⇄ `part`."""
    return _apply(_Joined, own, dim, elements)


def gathered(own: Tensor, dim: int, elements: Elements) -> Tensor:
    """The whole of what ranks have divided, of which each computes another part of what follows. ⇄ `total_part`.

    Args:
        own: this rank's elements.
        dim: the dimension that is divided.
        elements: which they are.
    """
    return _apply(_Gathered, own, dim, elements)


def total_part(x: Tensor, dim: int, elements: Elements) -> Tensor:
    """This rank's elements of the sum of what ranks computed. ⇄ `gathered`."""
    return _apply(_TotalPart, x, dim, elements)


def _apply(function: Any, *args: Any) -> Tensor:
    if torch.compiler.is_dynamo_compiling():
        traced: Tensor = function.apply(*args)
        return traced
    # Without what `Function.apply` looks for first, for it is not here: defaults of a `setup_context`, and transforms.
    made: Tensor = super(Function, function).apply(*args)
    return made


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return total(gradient, ctx.ranks) if torch.is_grad_enabled() else summed(gradient, ctx.ranks.group), None


class _Count(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class _Total(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return result(summed(x, ranks.group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return entered(gradient, ctx.ranks) if torch.is_grad_enabled() else gradient, None


class _Part(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, elements: Elements) -> Tensor:
        ctx.dim, ctx.elements = dim, elements
        return result(elements.take(x, dim).contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        join = joined if torch.is_grad_enabled() else whole_of
        return join(gradient, ctx.dim, ctx.elements), None, None


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, dim: int, elements: Elements) -> Tensor:
        ctx.dim, ctx.elements = dim, elements
        return result(whole_of(own, dim, elements))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dim, elements = ctx.dim, ctx.elements
        own = part(gradient, dim, elements) if torch.is_grad_enabled() else elements.take(gradient, dim)
        return own.contiguous(), None, None


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, dim: int, elements: Elements) -> Tensor:
        ctx.dim, ctx.elements = dim, elements
        return result(whole_of(own, dim, elements))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        scatter = total_part if torch.is_grad_enabled() else part_of_sum
        return scatter(gradient, ctx.dim, ctx.elements), None, None


class _TotalPart(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, elements: Elements) -> Tensor:
        ctx.dim, ctx.elements = dim, elements
        return result(part_of_sum(x, dim, elements))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gather = gathered if torch.is_grad_enabled() else whole_of
        return gather(gradient, ctx.dim, ctx.elements), None, None


def require_first_order() -> None:
    """Raises RuntimeError where a backward pass makes a graph of what cannot be differentiated again."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a backward pass with create_graph=True runs through messages that cannot be differentiated again: those "
            "of attention over a divided sequence, of experts on other ranks, or of TensorParallel(overlap=True); use "
            "ContextParallel(method='ulysses'), a strategy without ExpertParallel or overlap=False, or leave out the "
            "loss that needs it, such as a gradient penalty"
        )


# ---------------------------------------------------------------- without gradients of their own


def whole_of(own: Tensor, dim: int, elements: Elements) -> Tensor:
    """The whole of what ranks have divided."""
    if elements.even:
        return joined_parts(own, dim, elements.ranks.group)
    rows = _parts(own, dim, elements)  # (ranks x longest, ...)
    return rows.index_select(0, elements.order(own.device)).movedim(0, dim).contiguous()


def part_of_sum(x: Tensor, dim: int, elements: Elements) -> Tensor:
    """This rank's elements of the sum of what ranks computed."""
    ranks = elements.ranks
    if elements.even:
        return part_of_total(x, dim, ranks.group)
    rows = x.movedim(dim, 0).index_select(0, elements.of_all(x.device).clamp(max=elements.size - 1))
    own = scattered(rows.view(ranks.count, len(rows) // ranks.count, *rows.shape[1:]), ranks.group)
    return own[: elements.length].movedim(0, dim).contiguous()


def _parts(own: Tensor, dim: int, elements: Elements) -> Tensor:
    rows, missing = own.movedim(dim, 0), elements.longest - elements.length
    if missing:
        # one operation: zeros of their own would be real where rows have a shape only, and be sent on this rank alone
        rows = torch.constant_pad_nd(rows, (0, 0) * (rows.dim() - 1) + (0, missing))
    return parts_of_all(rows, elements.ranks.group).flatten(0, 1)
