"""Computing with what a rank keeps of a parameter, as a plain tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor

from lightning_parallel.techniques.tools.shards import ElementsShard, made_as_dtensors_are


def leaf_of(parameter: Tensor) -> Tensor:
    """The leaf that computation differentiates for a parameter: itself, or the plain tensor that a rank keeps of it.

    Operations on a DTensor, and its conversion within autograd, cost several times as much as those on a plain tensor.
    So the plain part is a leaf of its own, whose gradient moves to the parameter as it arrives, before hooks on the
    parameter run.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_dynamo_compiling():
        # Gradients of a graph are DTensors, and torch cannot add up those in parts.
        in_parts = any(isinstance(placement, ElementsShard) for placement in parameter.placements)
        return _outside_of_graphs(parameter) if in_parts else parameter.to_local()
    return _plain_leaf(parameter)


def outside_transforms() -> AbstractContextManager[Any]:
    """Inside, no transform of `torch.func` acts."""
    return temporarily_clear_interpreter_stack() if torch._C._are_functorch_transforms_active() else nullcontext()


def taken_out(name: str) -> ValueError:
    """The error for a parameter in whose place something else stands, or nothing, while a step runs or after it."""
    return ValueError(
        f"the parameter {name} was replaced, or taken out of its module, in a step, but ranks hold parts of the "
        "parameters that the run began with; write into it (parameter.copy_(...) under torch.no_grad()), or replace it "
        "before the run"
    )


def _plain_leaf(parameter: DTensor) -> Tensor:
    leaf: _PlainPart | None = vars(parameter).get("_leaf")
    # a parameter that was copied or replaced has other memory
    if leaf is None or leaf.kept is not parameter._local_tensor or leaf.parameter is not parameter:
        leaf = vars(parameter)["_leaf"] = _PlainPart(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        learns = parameter.requires_grad
    if leaf.tensor.requires_grad is not learns:
        # a function that torch transforms, as `vmap`, may be the first to use it, and transforms change no flags
        with outside_transforms():
            leaf.tensor.requires_grad_(learns)
        if learns and not leaf.listens:  # from now on gradients move to the parameter
            register = cast(Callable[..., object], leaf.tensor.register_post_accumulate_grad_hook)
            register(partial(_move_gradient, weakref.ref(leaf)))
            leaf.listens = True
    return leaf.tensor


_outside_of_graphs: Callable[[DTensor], Tensor] = cast(Any, torch.compiler.disable)(_plain_leaf)


class _PlainPart:
    """The plain part of one parameter.

    The hook of its tensor leads back by a weak reference: the garbage collector does not see what the hooks of a tensor
    hold, and a circle through one would keep the memory of every model that was divided. The parameter itself bears no
    weak reference, for `module.to` refuses to move such a one.
    """

    def __init__(self, parameter: DTensor) -> None:
        self.parameter = parameter
        self.kept = parameter._local_tensor
        self.tensor = self.kept.detach()
        self.listens = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of the parameter makes one of its own."""
        return type(None), ()


def _move_gradient(of: weakref.ref[_PlainPart], tensor: Tensor) -> None:
    gradient: Any = tensor.grad
    tensor.grad, leaf = None, of()
    if leaf is None:
        return
    parameter: Any = leaf.parameter
    with torch._C.DisableTorchFunctionSubclass():  # while a step runs its class is another one
        learns, before = parameter.requires_grad, parameter.grad
        hooks = parameter._post_accumulate_grad_hooks
    if not learns:  # it was frozen after it was used
        return
    if gradient is not None:  # None is passed by a pipeline for a parameter that no step used
        if before is None:
            made = made_as_dtensors_are(DTensor, gradient, parameter._spec, False)
            with torch._C.DisableTorchFunctionSubclass():
                parameter.grad = made
        else:
            before._local_tensor.add_(gradient.detach())
    for hook in (hooks or {}).values():
        hook(parameter)
