"""Where Python begins: torch's functions that are written in it, those of autograd, and what is called below both."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import BackwardCFunction, Function
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel.techniques.divided.table import written_by

OF_FUNCTIONS = frozenset(
    (Function.apply.__func__.__code__, BackwardCFunction.apply.__code__)  # type: ignore[attr-defined]
)
"""The frames below the forward and the backward of such a function."""


def running_function() -> type | None:
    """The function of autograd, written in Python, in whose forward or backward this is called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in OF_FUNCTIONS:
            return frame.f_locals.get("cls") or type(frame.f_locals["self"])
        frame = frame.f_back
    return None


def in_function() -> bool:
    """Whether a function of autograd written in Python runs: what it returns must not be divided.

    Such a function may use tensors that it was not given, as a parameter of the module in whose forward it is written.
    Gradients are off in it, so nobody asks on the usual way. A reentrant checkpoint only runs a layer.
    """
    function = running_function()
    return function is not None and not function.__name__.startswith("CheckpointFunction")


in_transform = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func` runs."""


def takes_wholes() -> bool:
    """Whether what runs takes no divided tensors: a function of autograd, or a transform of `torch.func`."""
    if torch.is_grad_enabled() or in_transform():
        return in_transform()
    # In a forward of such a function there is no forward mode either, as in inference mode; a backward has its node.
    maybe = not torch._C._is_fwd_grad_enabled() or torch._C._current_autograd_node() is not None
    return maybe and in_function()


def outside_of_transforms() -> AbstractContextManager[Any]:
    """Inside, no transform of `torch.func` acts: they take no function of autograd as those of collectives."""
    return temporarily_clear_interpreter_stack() if in_transform() else nullcontext()


@functools.cache
def body_of(func: Any) -> Callable[..., Any] | None:
    """What torch has written in Python for an operation made of others, which then meet their own rules; else None.

    Torch's functionals first ask whether a tensor has rules of its own (`has_torch_function`), and then compute. The
    body is the same code in a namespace where the answer is no.
    """
    inside = getattr(func, "__module__", None) in ("torch.nn.functional", "torch.functional")
    if not inside or not isinstance(func, FunctionType) or "handle_torch_function" not in func.__code__.co_names:
        return None
    unasked = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _no)
    body = FunctionType(
        func.__code__, {**func.__globals__, **unasked}, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _no(*_: Any) -> bool:
    return False


T = TypeVar("T", bound=Tensor)


def called_below(
    func: Any,
    args: Any,
    kwargs: Any,
    form: type[T],
    whole: Callable[[T], Tensor],
    what: str,
    remedy: str,
    write: Callable[[T, Tensor], None] | None = None,
) -> Any:
    """The result of an operation that is called below autograd, where no rule is asked, on whole tensors.

    Args:
        func: the operation.
        args: of the call.
        kwargs: of the call.
        form: the tensors that only look whole; each has this rank's elements in `own`.
        whole: gives one that is.
        what: such a tensor is, for the error.
        remedy: what to do about it.
        write: gives one the elements that it has of a whole; none where that cannot be.

    Raises:
        RuntimeError: a gradient, or what the operation writes, would be lost here.
    """
    given: list[Any] = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, form)]
    collective = getattr(func, "namespace", "") == "c10d"  # has no gradient, and its schema says not what it writes
    if not collective and torch.is_grad_enabled() and any(each.own.requires_grad for each in given):
        raise RuntimeError(f"{func} is called below Python on {what}, where its gradient cannot be followed; {remedy}")
    wholes = {id(each): whole(each).detach() for each in given}
    written = given if collective else [each for each in written_by(func, args, kwargs or {}) if isinstance(each, form)]
    if written and write is None:
        raise RuntimeError(f"{func} writes, below Python, to {what}, which does not reach it; {remedy}")
    wholes |= {id(each): wholes[id(each)].clone() for each in written}  # a collective's result may not be changed
    args, kwargs = tree_map_only(form, lambda each: wholes[id(each)], (args, kwargs or {}))
    result = func(*args, **kwargs)
    if collective:
        (result[-1] if isinstance(result, tuple) else result)._get_method("wait")()  # before its results are taken over
    if write is not None:
        for each in written:
            write(each, wholes[id(each)])
    return result
