"""Code that `__torch_function__` does not see: inside autograd Functions and transforms, and below autograd."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from lightning_parallel.techniques.divided.table import written_by

log = logging.getLogger(__name__)


def in_function() -> bool:
    """Whether the forward or backward of a Python autograd Function runs; a reentrant checkpoint's backward is none.

    In a forward, torch switches forward-mode differentiation off, which otherwise only inference mode does. In a
    backward, the current autograd node is that of the Function.
    """
    if not torch._C._is_fwd_grad_enabled():
        return not torch.is_inference_mode_enabled()
    node: Any = torch._C._current_autograd_node()
    return isinstance(node, BackwardCFunction) and cast(Any, node)._forward_cls is not CheckpointFunction


in_transform = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func` is active."""


def takes_full_tensors() -> bool:
    """Whether the running code takes no `Divided` tensors: an autograd Function, or a transform of `torch.func`.

    Both may use tensors that are not their arguments, such as a parameter of the module whose forward defines them. A
    Function must not return a `Divided` tensor: gradients are off inside, so the tensor would have no autograd history.
    """
    return in_transform() or (not torch.is_grad_enabled() and in_function())


def _refused(why: str) -> RuntimeError:
    log.error(why)  # TorchScript drops the text of errors that pass it
    return RuntimeError(why)


T = TypeVar("T", bound=Tensor)


def run_below_autograd(
    func: Any,
    args: Any,
    kwargs: Any,
    form: type[T],
    whole: Callable[[T], Tensor],
    what: str,
    remedy: str,
    write: Callable[[T, Tensor], None] | None = None,
) -> Any:
    """Run an operation that is called below autograd, where no rule is dispatched, on full tensors.

    Args:
        func: the operation.
        args: of the call.
        kwargs: of the call.
        form: class of the sharded tensors; each has its local shard in `own`.
        whole: returns the full tensor of one of them.
        what: describes such a tensor, for the error.
        remedy: what the user can do, for the error.
        write: writes this rank's elements of a full tensor to one of them; None if they cannot be written.

    Raises:
        RuntimeError: a gradient, or what the operation writes, would be lost.
    """
    given: list[Any] = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, form)]
    collective = getattr(func, "namespace", "") == "c10d"  # has no gradient, and its schema does not say what it writes
    if not collective and torch.is_grad_enabled() and any(each.own.requires_grad for each in given):
        raise _refused(f"{func} is called from C++ on {what}, where its gradient cannot be followed; {remedy}")
    wholes = {id(each): whole(each).detach() for each in given}
    written = given if collective else [each for each in written_by(func, args, kwargs or {}) if isinstance(each, form)]
    if written and write is None:
        raise _refused(f"{func} writes from C++ to a copy of {what}, so the change is lost; {remedy}")
    wholes |= {id(each): wholes[id(each)].clone() for each in written}  # the result of a gather may not be changed
    args, kwargs = tree_map_only(form, lambda each: wholes[id(each)], (args, kwargs or {}))
    result = func(*args, **kwargs)
    if collective:
        (result[-1] if isinstance(result, tuple) else result)._get_method("wait")()  # before its results are read back
    if write is not None:
        for each in written:
            write(each, wholes[id(each)])
    return result
