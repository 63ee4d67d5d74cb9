"""Where the hidden state enters a region: at its colwise modules, or already at the module that holds them.

With a split sequence, a module that reshapes by the shape of what it gets must get the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_parallel.techniques.tensor_parallel.activations import Activations
from lightning_parallel.techniques.tensor_parallel.layout import Divided, parent_of
from lightning_parallel.techniques.tools.redirect import Forward, redirect_forward


def enter_in_parents(block: nn.Module, divided: Mapping[str, Divided], activations: Activations) -> None:
    """Lets hidden states enter, where a block's mode says so, at the modules that hold colwise ones."""
    colwise = {parent_of(name) for name, each in divided.items() if each.style.kind.startswith("colwise")}
    heads = {parent_of(name) for name, each in divided.items() if each.head > 1}
    for name in sorted(colwise - {""}):  # the block itself gets what is to be split
        redirect_forward(block.get_submodule(name), partial(_entering, activations, name, name in heads))


def _entering(activations: Activations, region: str, has_heads: bool, forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        mode = activations.mode
        if mode.entry == "linear" or region in mode.gathered or (mode.entry == "face" and not has_heads):
            return forward(*args, **kwargs)
        enter = partial(_entered, activations)
        if mode.entry == "face":
            return _facing(activations, forward, args, kwargs)
        args, kwargs = tuple(map(enter, args)), {name: enter(value) for name, value in kwargs.items()}
        with activations.inside():
            return forward(*args, **kwargs)

    return run


def _entered(activations: Activations, value: Any) -> Any:
    return activations.enter(value) if _is_hidden(activations, value) else value


def _facing(activations: Activations, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs attention as a narrower one, of this rank's heads, that looks at nothing but the shape of what it gets."""
    hidden = next((value for value in (*args, *kwargs.values()) if _is_hidden(activations, value)), None)
    if hidden is None:
        return forward(*args, **kwargs)
    entered = activations.enter(hidden)
    face = activations.face_of(entered)
    args, kwargs = tree_map_only(Tensor, lambda value: face if value is hidden else value, (args, kwargs))
    with activations.facing(face, entered):
        return forward(*args, **kwargs)


def _is_hidden(activations: Activations, value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
        return False
    return tuple(value.shape[1:]) == activations.form


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
