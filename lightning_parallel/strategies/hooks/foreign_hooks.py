"""Hooks that users put on tensors and optimizers themselves, past Lightning: they would see parts, or nothing.

Lightning's hooks find whole parameters and whole gradients. Those of torch (`Tensor.register_hook`,
`Tensor.register_post_accumulate_grad_hook`, `Optimizer.register_step_post_hook`) run within backward and within a step:
for the samples of one rank, for the part of a parameter that it keeps, or never, where another tensor has taken the
place of the parameter. What then trains something else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_parallel.strategies.hooks.looking import names_gradients
from lightning_parallel.techniques.tools.telling import warn

REMEDY = "look at gradients and change them in on_before_optimizer_step, where they are whole on every rank"


def hooked(parameters: Mapping[str, Any]) -> dict[str, bool]:
    """The parameters with a user's hook on their gradient, and whether one of it is called with what accumulated."""
    found = {}
    for name, parameter in parameters.items():
        accumulated = _of_users(parameter._post_accumulate_grad_hooks)
        if accumulated or _of_users(parameter._backward_hooks):
            found[name] = bool(accumulated)
    return found


def fault_of_gradients(
    before: Mapping[str, bool], held: Mapping[str, nn.Parameter], divided: bool, parts: bool
) -> str | None:
    """An error for hooks that would not do what they do on one device, or None; warns of those that may not.

    Args:
        before: what `hooked` found before the model was divided.
        held: the parameters that this rank holds now.
        divided: whether ranks have summands of gradients, whatever the parameters are.
        parts: whether backward runs on a part of the batch.
    """
    now = hooked(held)
    for name in held.keys() & (before.keys() | now.keys()):
        if divided or name not in now or isinstance(held[name], DTensor):
            return f"the hook on the gradient of {name} would not be called with it: ranks hold parts of it; {REMEDY}"
        if parts and now[name]:
            return (
                f"the hook on {name} (register_post_accumulate_grad_hook) would be called with the gradient of a part "
                f"of the batch; return optimizers from configure_optimizers, and {REMEDY}"
            )
    if parts and now:
        warn(
            f"Hooks on gradients (register_hook, on {min(now)}) are called with the gradient of a part of the batch, "
            f"and what they return is added up: right for masks and factors; for all else, {REMEDY}"
        )
    return None


def fault_of_optimizers(optimizers: Iterable[Optimizer]) -> str | None:
    """An error for hooks of optimizers where ranks hold parts of parameters, or None."""
    for optimizer in optimizers:
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            if _of_users(_beside(register)):
                return (
                    f"the hook of {type(optimizer).__name__} ({register.__name__}) would find the part of each "
                    "parameter that its rank steps; do it in on_before_optimizer_step or in on_train_batch_end, which "
                    "find whole parameters on every rank"
                )
    return None


def fault_of_all(module: nn.Module) -> str | None:
    """An error for hooks of all optimizers that look at gradients, where ranks hold other parameters, or None."""
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        for hook in _of_users(_beside(register)):
            if names_gradients(SimpleNamespace(call=hook), "call", module):
                return (
                    f"the hook of all optimizers ({register.__name__}) would find the gradients of one stage of the "
                    f"pipeline; {REMEDY}"
                )
    return None


def before_steps(optimizers: Iterable[Optimizer]) -> list[tuple[dict[Any, Any], Any]]:
    """Users' hooks before the steps of optimizers, or of all: the tables in which they are, and their keys there.

    Lightning has yet to run the last batch then: what has accumulated is what such a hook finds, and may change.
    """
    registers = [register_optimizer_step_pre_hook, *(each.register_step_pre_hook for each in optimizers)]
    tables = [_table(register) for register in registers]
    return [(table, key) for table in tables for key, hook in table.items() if _of_users({key: hook})]


class Places:
    """A tree and the parameters in it, to see what a hook did with them while it was shown the whole model.

    Args:
        module: as the hook finds it.
        made: the whole parameters in it that stand for parts.
    """

    def __init__(self, module: nn.Module, made: Iterable[Tensor]) -> None:
        self._parts = [
            (f"{path}." if path else "", part, type(part), dict(part._modules), dict(part._parameters))
            for path, part in module.named_modules()
        ]
        self._made = {id(tensor) for tensor in made}

    def refuse_changes(self, reader: str) -> None:
        """Raises, with the tree as it was, for parameters that were replaced, taken away or given hooks in vain.

        Args:
            reader: the hook.
        """
        faults = [fault for prefix, part, _, _, tensors in self._parts for fault in self._faults(prefix, part, tensors)]
        if faults:
            self._put_back()
            raise ValueError(f"{reader} {faults[0]}")

    def _faults(self, prefix: str, part: nn.Module, tensors: Mapping[str, Any]) -> Iterator[str]:
        for name, tensor in tensors.items():
            if part._parameters.get(name) is not tensor:
                yield (
                    f"put something else in the place of the parameter {prefix}{name}, but ranks hold parts of those "
                    "that the model had when the run began; write into it (`copy_`), or tie, replace and parametrize "
                    "before the run"
                )
            elif id(tensor) in self._made and hooked({name: tensor}):
                yield f"put a hook on the gradient of {prefix}{name}, of which ranks hold parts; {REMEDY}"

    def _put_back(self) -> None:
        for _, part, kind, modules, parameters in self._parts:
            part.__class__ = kind
            for table, before in ((part._modules, modules), (part._parameters, parameters)):
                table.clear()
                table.update(before)


def _beside(register: Callable[[Any], Any]) -> Mapping[Any, Any]:
    """The hooks among which a method registers."""
    return dict(_table(register))


def _table(register: Callable[[Any], Any]) -> dict[Any, Any]:
    handle = register(_nothing)
    handle.remove()
    return handle.hooks_dict_ref() or {}


def _nothing(*_: Any) -> None:
    """Does nothing."""


def _of_users(hooks: Mapping[Any, Any] | None) -> list[Any]:
    return [hook for hook in (hooks or {}).values() if not _module_of(hook).startswith("lightning_parallel.")]


def _module_of(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return str(hook.__module__)
