"""A gradient of which ranks hold parts, as hooks of the user's see it: like the whole tensor that one device has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from lightning_parallel.techniques.divided.table import is_in_place
from lightning_parallel.techniques.tools.shards import shard_of, whole_tensor

POINTWISE = {
    *("mul_", "__imul__", "div_", "__itruediv__", "neg_", "zero_", "clamp_", "clamp_min_", "clamp_max_", "nan_to_num_"),
    *("_foreach_mul_", "_foreach_div_", "_foreach_zero_", "_foreach_clamp_min_", "_foreach_clamp_max_"),
}
"""What changes every element by itself, and so needs no other rank."""

ABOUT = {
    *("size", "dim", "numel", "nelement", "ndimension", "stride", "element_size", "get_device", "__len__", "__hash__"),
    *("is_floating_point", "is_complex", "is_contiguous", "requires_grad_", "retain_grad"),
}
"""What asks about a tensor, not about its values."""

VIEWS = {"T", "mT", "H", "mH", "real", "imag"}

ARRAYS = {"numpy", "__array__", "__dlpack__"}
"""What gives memory to others than torch."""


class ShownGradient(DTensor):
    """Reads gather the whole, one tensor at a time; writes change what this rank keeps. All ranks must do the same.

    Where code gets a view of the whole, as `p.grad[:2]`, the whole stays here: what is written to the view is taken
    over by `settle`.
    """

    divided: DTensor
    gathered: Tensor | None
    version: int | None

    @classmethod
    def of(cls, gradient: DTensor) -> ShownGradient:
        """Over the same memory."""
        shown: ShownGradient = cls(gradient._local_tensor, gradient._spec, requires_grad=False)
        shown.divided, shown.gathered, shown.version = gradient, None, None
        return shown

    def bring(self) -> None:
        """From now on the whole is here, for reads to which not all ranks come."""
        self.keep(_whole(self))

    def keep(self, whole: Tensor, counts: bool = True) -> None:
        """Keeps the whole, of which code has a view.

        Args:
            whole: all elements, as they are now.
            counts: whether torch counts what is written to the view; it does not in an array of NumPy.
        """
        self.gathered, self.version = whole, whole._version if counts else -1

    def settle(self) -> None:
        """Takes over what was written to views."""
        if self.gathered is not None and self.gathered._version != self.version:
            self._local_tensor.copy_(shard_of(self.gathered, self.divided).to_local())
            self.version = -1 if self.version == -1 else self.gathered._version

    def let_go(self) -> None:
        """The same, when code that has views is over: from now on the part may be changed alone."""
        self.settle()
        self.gathered = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.Tensor.__torch_function__`."""
        name, kwargs = func.__name__, kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            attribute = func.__self__.__name__ if name in ("__get__", "__set__") else None
            if name == "__get__" and attribute not in VIEWS:
                return args[0] if attribute == "data" else func(*args, **kwargs)
            if name in ABOUT or (name == "type" and len(args) + len(kwargs) == 1):  # with a dtype it converts
                return func(*args, **kwargs)
            if name == "detach":
                return args[0]
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShownGradient)]
            for each in given:
                each.settle()
            if name == "_foreach_norm":
                return tuple(norm for tensor in args[0] for norm in func([_whole(tensor)], *args[1:], **kwargs))
            if attribute == "data" and isinstance(args[0], ShownGradient):
                return _write(Tensor.copy_, args, kwargs)
            first = args[:1] or tuple(kwargs.values())[:1]  # functions of torch.nn.init name all that they get
            written = (first if is_in_place(name) else (), kwargs.get("out"))
            if any(isinstance(each, cls) for each in pytree.tree_leaves(written)):
                return _write(func, args, kwargs)
            return _read(func, args, kwargs, given)


def _read(func: Any, args: Any, kwargs: Any, given: list[ShownGradient]) -> Any:
    """What a function returns for wholes; of those of which it is a view, the wholes stay."""
    wholes = {id(each): _whole(each) for each in given}
    args, kwargs = _mapped(lambda each: wholes[id(each)], (tuple(args), kwargs))
    result = func(*args, **kwargs)
    made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    for each in given:
        memory = wholes[id(each)].untyped_storage().data_ptr()
        if func.__name__ in ARRAYS or any(leaf.untyped_storage().data_ptr() == memory for leaf in made):
            each.keep(wholes[id(each)], counts=func.__name__ not in ARRAYS and each.version != -1)
    return result


def _mapped(change: Callable[[Any], Any], values: Any) -> Any:
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
    if isinstance(now, ShownGradient):
        now.settle()
        if now.divided is own:
            return before
    part = shard_of(_whole(now).detach(), like if own is None else own)
    return ShownGradient.of(part) if isinstance(before, ShownGradient) else part


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    operands = [leaf for leaf in pytree.tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor)]
    first = args[0] if args else next(iter(kwargs.values()))
    targets = [leaf for leaf in pytree.tree_leaves((first, kwargs.get("out"))) if isinstance(leaf, ShownGradient)]
    kept = any(target.gathered is not None for target in targets)
    if func.__name__ in POINTWISE and not kept and not any(operand.dim() for operand in operands):
        func(*_mapped(lambda shown: shown._local_tensor, args), **kwargs)
        return first
    wholes = {id(target): _whole(target) for target in targets}
    given = _mapped(lambda shown: wholes.get(id(shown), _whole(shown)), (tuple(args), kwargs))
    func(*given[0], **given[1])
    for target in targets:
        target._local_tensor.copy_(shard_of(wholes[id(target)], target.divided).to_local())
        if target.gathered is not None:
            target.keep(wholes[id(target)], counts=target.version != -1)
    return kwargs.get("out", first)
