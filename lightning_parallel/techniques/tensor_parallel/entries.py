"""Where the hidden state enters a region: at its colwise modules, or already at the module that holds them.

With a split sequence, a module that reshapes by the shape of what it gets must get the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from lightning_parallel.techniques.redirect import Forward, redirect_forward
from lightning_parallel.techniques.tensor_parallel.activations import Activations
from lightning_parallel.techniques.tensor_parallel.layout import Divided, parent_of

Entry = Literal["linear", "parent"]


def enter_in_parents(block: nn.Module, divided: Mapping[str, Divided], activations: Activations) -> None:
    """Lets split hidden states enter at the modules that hold colwise ones, unless that is the block itself."""
    inputs: dict[str, int] = {}
    for name, each in divided.items():
        if each.style.kind.startswith("colwise") and parent_of(name):
            weight = each.module._parameters["weight"]
            assert weight is not None
            inputs[parent_of(name)] = weight.shape[1 - each.dim]
    for name, width in inputs.items():
        redirect_forward(block.get_submodule(name), partial(_entering, activations, width))


def _entering(activations: Activations, width: int, forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        if activations.length is None:
            return forward(*args, **kwargs)
        shape = (activations.own_length, width)

        def enter(value: Any) -> Any:
            return activations.enter(value) if _is_hidden(value, shape, activations.sequence_dim) else value

        args, kwargs = tuple(map(enter, args)), {name: enter(value) for name, value in kwargs.items()}
        with activations.inside():
            return forward(*args, **kwargs)

    return run


def _is_hidden(value: Any, shape: tuple[int | None, int], dim: int) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != 3:
        return False
    return (value.shape[dim], value.shape[-1]) == shape


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The hidden state among the inputs of a block: the first tensor of real numbers."""
    candidates = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return next((value for value in candidates if value.is_floating_point()), None)


def replace_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a block with another hidden state."""
    hidden = hidden_of(args, kwargs)
    if hidden is None:
        return args, kwargs
    changed = change(hidden)
    new_args = tuple(changed if value is hidden else value for value in args)
    return new_args, {name: changed if value is hidden else value for name, value in kwargs.items()}
