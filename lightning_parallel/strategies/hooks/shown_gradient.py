"""A gradient of which ranks hold parts, as hooks of the user's see it: like the whole tensor that one device has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from lightning_parallel.techniques.tools.shards import shard_of, whole_tensor

POINTWISE = {
    *("mul_", "__imul__", "div_", "__itruediv__", "neg_", "zero_", "clamp_", "clamp_min_", "clamp_max_", "nan_to_num_"),
    *("_foreach_mul_", "_foreach_div_", "_foreach_zero_", "_foreach_clamp_min_", "_foreach_clamp_max_"),
}
"""What changes every element by itself, and so needs no other rank."""

ABOUT = {
    *("size", "dim", "numel", "nelement", "ndimension", "stride", "element_size", "get_device", "__len__", "__hash__"),
    *("is_floating_point", "is_complex", "is_contiguous", "requires_grad_", "retain_grad", "type"),
}
"""What asks about a tensor, not about its values."""

VIEWS = {"T", "mT", "H", "mH", "real", "imag"}


class ShownGradient(DTensor):
    """Reads gather the whole, one tensor at a time; writes change what this rank keeps. All ranks must do the same."""

    divided: DTensor
    gathered: Tensor | None

    @classmethod
    def of(cls, gradient: DTensor) -> ShownGradient:
        """Over the same memory."""
        shown: ShownGradient = cls(gradient._local_tensor, gradient._spec, requires_grad=False)
        shown.divided, shown.gathered = gradient, None
        return shown

    def bring(self) -> None:
        """From now on the whole is here, for reads to which not all ranks come."""
        self.gathered = whole_tensor(self.divided)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.Tensor.__torch_function__`."""
        name, kwargs = func.__name__, kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__get__" and func.__self__.__name__ not in VIEWS:
                return args[0] if func.__self__.__name__ == "data" else func(*args, **kwargs)
            if name in ABOUT:
                return func(*args, **kwargs)
            if name == "detach":
                return args[0]
            if name == "_foreach_norm":
                return tuple(norm for tensor in args[0] for norm in func([_whole(tensor)], *args[1:], **kwargs))
            if _writes(name, args):
                return _write(func, args, kwargs)
            return func(*_mapped(_whole, args), **_mapped(_whole, kwargs))


def _mapped(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    return pytree.tree_map_only(ShownGradient, change, values)


def _whole(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, ShownGradient):
        return tensor
    return whole_tensor(tensor.divided) if tensor.gathered is None else tensor.gathered


def taken_over(now: Tensor | None, before: DTensor | None, like: DTensor) -> Tensor | None:
    """The gradient that a rank keeps, of what a hook has left of the one that it was shown.

    Args:
        now: what it left: the one that was shown, nothing, or a tensor of its own.
        before: what stood for the gradient, or was it, around the hook.
        like: divided as the gradient is.
    """
    if now is None:
        return None
    own = before.divided if isinstance(before, ShownGradient) else before
    if isinstance(now, ShownGradient) and now.divided is own:
        return before
    part = shard_of(_whole(now).detach(), like if own is None else own)
    return ShownGradient.of(part) if isinstance(before, ShownGradient) else part


def _writes(name: str, args: Any) -> bool:
    written = name == "__setitem__" or (name.startswith("__i") and name.endswith("__")) or name.rstrip("_") != name
    special = name.endswith("__") and not (name.startswith("__i") or name == "__setitem__")
    return written and not special and any(isinstance(leaf, ShownGradient) for leaf in pytree.tree_leaves(args[0]))


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    operands = [leaf for leaf in pytree.tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor)]
    if func.__name__ in POINTWISE and not any(operand.dim() for operand in operands):
        func(*_mapped(lambda shown: shown._local_tensor, args), **kwargs)  # type: ignore[attr-defined]
        if any(isinstance(leaf, ShownGradient) and leaf.gathered is not None for leaf in pytree.tree_leaves(args[0])):
            func(*_mapped(_whole, args), **kwargs)
        return args[0]
    targets = [leaf for leaf in pytree.tree_leaves(args[0]) if isinstance(leaf, ShownGradient)]
    wholes = {id(target): _whole(target) for target in targets}
    func(*_mapped(lambda shown: wholes.get(id(shown), _whole(shown)), args), **_mapped(_whole, kwargs))
    for target in targets:
        target._local_tensor.copy_(shard_of(wholes[id(target)], target.divided).to_local())
    return args[0]
