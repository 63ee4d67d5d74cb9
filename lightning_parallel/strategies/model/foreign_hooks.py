"""Hooks of torch on parameters and optimizers: they would see parts of gradients, or never be called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel.techniques.tools.telling import warn

REMEDY = "read and change gradients in on_before_optimizer_step, where they compute as the whole on every rank"


def hooked(parameters: Mapping[str, Any]) -> dict[str, bool]:
    """The parameters with a user's hook on their gradient, and whether one of it is called with what accumulated."""
    accumulated = {name: _of_users(each._post_accumulate_grad_hooks) for name, each in parameters.items()}
    found = {name: bool(accumulated[name] or _of_users(each._backward_hooks)) for name, each in parameters.items()}
    return {name: bool(accumulated[name]) for name, any_hook in found.items() if any_hook}


def fault_of_hooks(
    before: Mapping[str, bool], held: Mapping[str, Any], batch: bool, optimizers: Iterable[Optimizer]
) -> str | None:
    """An error for hooks that would not see what they see on one device, or None.

    Args:
        before: what `hooked` found before the model was divided.
        held: the parameters that this rank holds now.
        batch: whether ranks or microbatches compute gradients of parts of the batch.
        optimizers: those that step parts of parameters.
    """
    now = hooked(held)
    for name in held.keys() & (before.keys() | now.keys()):
        if isinstance(held[name], DTensor) or (batch and now.get(name, True)):
            return f"the hook of torch on {name} would see a part of its gradient, or none; {REMEDY}"
    if batch and now:
        warn(
            f"The hook on {min(now)} sees gradients of a part of the batch: right for masks and factors; else {REMEDY}"
        )
    for optimizer in optimizers:
        tables = (vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post"))
        if any(map(_of_users, tables)):
            return f"the step hook of {type(optimizer).__name__} would see the shards that each rank steps; {REMEDY}"
    return None


def _of_users(hooks: Mapping[Any, Any] | None) -> list[Any]:
    plain = [hook.func if isinstance(hook, partial) else hook for hook in (hooks or {}).values()]
    return [hook for hook in plain if not str(getattr(hook, "__module__", "")).startswith("lightning_parallel.")]
