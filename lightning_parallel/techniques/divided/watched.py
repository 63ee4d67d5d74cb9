"""What graphs of a compiler cannot do: to sum gradients at once in backward passes of the user's own.

A graph is the same for all backward passes, so it leaves gradients of parameters to be reduced when the step ends.
A step that asks for one in between would get a summand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.tensor import Divided


def watch(outputs: Sequence[Any], ranks: Sequence[Ranks], parameters: Sequence[Tensor | None]) -> None:
    """Watches what a graph returned: a backward pass that would give summands for gradients raises RuntimeError there.

    Args:
        outputs: plain tensors; what is none is left alone.
        ranks: that divide what comes in or goes out.
        parameters: of the module that is a graph, as it held them; None where it has none.
    """
    check = partial(_check, ranks, parameters)
    nodes = {each.grad_fn for each in outputs if isinstance(each, Tensor)}
    for node in nodes:
        if node is not None:
            node.register_prehook(check)


def _check(ranks: Sequence[Ranks], parameters: Sequence[Tensor | None], gradients: Any) -> None:
    if all(each.reduces_later for each in ranks):
        return
    averages = any(each.averages is not None for each in ranks)
    learning = [each for each in parameters if each is not None and each.requires_grad]
    if any(_gets_a_summand(parameter, averages) for parameter in learning):
        raise RuntimeError(
            "a backward pass of the step's own asks for gradients of parameters in a compiled block, of which "
            "ranks have summands until the step ends; use self.manual_backward(loss) in place of "
            "loss.backward(), leave out the loss that needs torch.autograd.grad, or leave out Compile"
        )


def _gets_a_summand(parameter: Tensor, averages: bool) -> bool:
    """Whether the backward pass that runs returns the gradient, or adds it where nobody sums it later."""
    alike = isinstance(parameter, Divided) and not parameter.cuts
    leaf = parameter.own if isinstance(parameter, Divided) else parameter
    try:
        accumulates: bool = torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # torch does not say so of what `torch.autograd.grad` was asked for
        return averages or alike
    return accumulates and alike
