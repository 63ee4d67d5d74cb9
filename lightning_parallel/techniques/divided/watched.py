"""What graphs of a compiler cannot do: to sum gradients at once in backward passes of the user's own.

A graph is the same for all backward passes, so it leaves gradients of parameters to be reduced when the step ends.
A step that asks for one in between would get a summand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.tensor import Divided


def watched(outputs: Sequence[Any], ranks: Sequence[Ranks], parameters: Sequence[Tensor]) -> list[Any]:
    """The plain outputs of a graph; a backward pass through them raises if it would give summands for gradients.

    Args:
        outputs: what the graph returned; what is no tensor stays as it is.
        ranks: that divide what comes in or goes out.
        parameters: of the module that is a graph, as it held them.
    """
    learning = [number for number, each in enumerate(outputs) if isinstance(each, Tensor) and each.requires_grad]
    if not learning:
        return list(outputs)
    watch: Any = super(Function, _Watch)  # without the detours of `Function.apply`
    seen = watch.apply(ranks, parameters, *(outputs[number] for number in learning))
    made = list(outputs)
    for number, each in zip(learning, seen, strict=True):
        made[number] = each
    return made


class _Watch(Function):
    @staticmethod
    def forward(ctx: Any, ranks: Sequence[Ranks], parameters: Sequence[Tensor], *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.parameters = ranks, parameters
        ctx.set_materialize_grads(False)
        return tuple(each.view_as(each) for each in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if not all(each.reduces_later for each in ctx.ranks):
            averages = any(each.averages is not None for each in ctx.ranks)
            if any(_gets_a_summand(parameter, averages) for parameter in ctx.parameters):
                raise RuntimeError(
                    "a backward pass of the step's own asks for gradients of parameters in a compiled block, of which "
                    "ranks have summands until the step ends; use self.manual_backward(loss) in place of "
                    "loss.backward(), leave out the loss that needs torch.autograd.grad, or leave out Compile"
                )
        return None, None, *gradients


def _gets_a_summand(parameter: Tensor, averages: bool) -> bool:
    """Whether the backward pass that runs returns the gradient, or adds it where nobody sums it later."""
    alike = isinstance(parameter, Divided) and not parameter.cuts
    leaf = parameter.own if isinstance(parameter, Divided) else parameter
    try:
        accumulates: bool = torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # torch does not say so of what `torch.autograd.grad` was asked for
        return averages or alike
    return accumulates and alike
