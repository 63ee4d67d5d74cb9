"""Plain tensors with which a step computes in place of DTensor parameters."""

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

from lightning_parallel.techniques.tools.shards import ElementsShard, construct_dtensor


def autograd_leaf(parameter: Tensor) -> Tensor:
    """Return the autograd leaf with which a step computes: the parameter itself, or a plain leaf for a DTensor.

    Operations on a DTensor, and its conversion within autograd, cost several times as much as those on a plain tensor.
    So the local shard is a separate plain leaf. As soon as its gradient is accumulated, the gradient moves to the
    parameter; then the hooks of the parameter run.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_dynamo_compiling():
        # Gradients of a compiled graph are DTensors, and torch cannot add up those placed as `ElementsShard`.
        by_elements = any(isinstance(placement, ElementsShard) for placement in parameter.placements)
        return _outside_of_graphs(parameter) if by_elements else parameter.to_local()
    return _plain_leaf(parameter)


def outside_transforms() -> AbstractContextManager[Any]:
    """Context manager: suspend the active transforms of `torch.func` inside."""
    return temporarily_clear_interpreter_stack() if torch._C._are_functorch_transforms_active() else nullcontext()


def replaced_error(name: str) -> ValueError:
    """Return the error for a parameter that a step replaced in its module or removed from it."""
    return ValueError(
        f"a step replaced the parameter {name} or removed it from its module, but ranks hold shards of the original "
        "since the run began; change it in place (parameter.copy_(...) under torch.no_grad()), or replace it before "
        "the run"
    )


def _plain_leaf(parameter: DTensor) -> Tensor:
    leaf: _PlainLeaf | None = vars(parameter).get("_leaf")
    # a parameter that was copied, or whose local tensor was replaced, needs a new leaf
    if leaf is None or leaf.kept is not parameter._local_tensor or leaf.parameter is not parameter:
        leaf = vars(parameter)["_leaf"] = _PlainLeaf(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        requires_grad = parameter.requires_grad
    if leaf.tensor.requires_grad is not requires_grad:
        # a function under a transform such as `vmap` may be the first to use the leaf, and there no flag can be changed
        with outside_transforms():
            leaf.tensor.requires_grad_(requires_grad)
        if requires_grad and not leaf.listens:  # from now on, move gradients to the parameter
            register = cast(Callable[..., object], leaf.tensor.register_post_accumulate_grad_hook)
            register(partial(_move_gradient, weakref.ref(leaf)))
            leaf.listens = True
    return leaf.tensor


_outside_of_graphs: Callable[[DTensor], Tensor] = cast(Any, torch.compiler.disable)(_plain_leaf)


class _PlainLeaf:
    """Plain leaf of one DTensor parameter, on the same memory.

    The hook of `tensor` has a weak reference to this object: the garbage collector does not see references of tensor
    hooks, so a cycle through a hook would keep the memory of every model that was divided. The weak reference is not to
    the parameter, as `module.to` refuses to move tensors that have weak references.
    """

    def __init__(self, parameter: DTensor) -> None:
        self.parameter = parameter
        self.kept = parameter._local_tensor
        self.tensor = self.kept.detach()
        self.listens = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Leave this object out of copies of the parameter, which make their own."""
        return type(None), ()


def _move_gradient(of: weakref.ref[_PlainLeaf], tensor: Tensor) -> None:
    """Move the gradient of a plain leaf to its parameter, and run the hooks of the parameter."""
    gradient: Any = tensor.grad
    tensor.grad, leaf = None, of()
    if leaf is None:
        return
    parameter: Any = leaf.parameter
    with torch._C.DisableTorchFunctionSubclass():  # during a step the parameter has another class
        requires_grad, accumulated = parameter.requires_grad, parameter.grad
        hooks = parameter._post_accumulate_grad_hooks
    if not requires_grad:  # the parameter was frozen after its use
        return
    if gradient is not None:  # None: a pipeline passes it for a parameter that no step used
        if accumulated is None:
            converted = construct_dtensor(DTensor, gradient, parameter._spec, False)
            with torch._C.DisableTorchFunctionSubclass():
                parameter.grad = converted
        else:
            accumulated._local_tensor.add_(gradient.detach())
    for hook in (hooks or {}).values():
        hook(parameter)
