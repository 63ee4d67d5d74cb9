"""Parameters that ranks have divided: DTensors between steps, and while one runs tensors that compute as the whole.

The type itself decides: for the time of a step, and of its backward pass, DTensors that `tp` divides have the class
`Part`. What computes with one gets the `Divided` tensor over the same memory; what asks for its gradient, its shape or
whether it learns gets what is stored. So modules, closures, checkpoints that recompute and hooks of `fully_shard` find
the same object at any time, and nothing is put in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.techniques.tools.leaves import leaf_of
from lightning_parallel.techniques.tools.shards import divides

GRADIENT, GIVE = Tensor.grad.__get__, Tensor.grad.__set__  # type: ignore[union-attr]
LEARN = (Tensor.requires_grad.__set__, Tensor.requires_grad_)  # type: ignore[attr-defined]
METHODS = (
    *("__hash__", "_is_view", "is_floating_point", "is_complex", "get_device", "register_post_accumulate_grad_hook"),
    *("size", "dim", "numel", "nelement", "ndimension", "__len__", "stride", "is_contiguous", "element_size"),
)
PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "requires_grad", "is_sparse", "is_cuda"),
    *("is_cpu", "is_meta", "is_quantized", "name", "_post_accumulate_grad_hooks", "_backward_hooks", "retains_grad"),
)
ABOUT = {
    *(GRADIENT, GIVE, *LEARN),
    *(getattr(Tensor, name) for name in METHODS),
    *(getattr(Tensor, name).__get__ for name in PROPERTIES),
}
"""What is asked of the stored tensor itself, and computes nothing."""


class Computing(Protocol):
    """What Divided tensors compute for parts while a step runs."""

    def of(self, part: Any) -> Any:
        """The `Divided` that computes for a part."""

    def take(self, stored: DTensor) -> None:
        """Makes a stored tensor a part, if `tp` alone divides it."""


class Part(DTensor):
    """The class of DTensors that `tp` divides while a step runs: they compute as `Divided` tensors.

    Attributes:
        step: what computes for them; None while an optimizer steps within the user's step, which computes with parts.
    """

    step: ClassVar[Computing | None] = None
    looked_at: ClassVar[bool] = False
    computes: Any = None
    """The `Divided` of one that a module holds, set when the step begins."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if Part.step is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in ABOUT:
            return _asked(Part.step, func, args, kwargs)
        args, kwargs = computing_in(args, kwargs)
        return func(*args, **kwargs)


def is_part(stored: Any) -> bool:
    """Whether `tp`, and nobody else, divides what is stored: what others have sharded, too, stays as it is."""
    if type(stored) is not DTensor:
        return False
    axes = zip(stored.device_mesh.mesh_dim_names or (), stored.placements, strict=False)
    return [axis for axis, placement in axes if divides(placement)] == ["tp"]


def computing_in(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments in which what computes for parts stands in their place."""
    step = Part.step
    given = [
        (each.computes if each.computes is not None and step is not None else computing(each))
        if (kind := type(each)) is Part
        else computing(each)
        if kind is list or kind is tuple
        else each
        for each in args
    ]
    return tuple(given), {name: computing(each) for name, each in kwargs.items()} if kwargs else {}


def computing(value: Any) -> Any:
    """What computes for a value while a step runs, in lists and tuples too."""
    kind = type(value)
    if kind is Part:
        return value if Part.step is None else Part.step.of(value)
    return kind(map(computing, value)) if kind is list or kind is tuple else value


def _asked(step: Computing, func: Any, args: Any, kwargs: Any) -> Any:
    """What the stored tensor says; gradients that it is given may look whole, and those that it has compute so."""
    if func == GIVE and args[1] is not None and not isinstance(args[1], DTensor):
        step.of(args[0]).grad = args[1]
        return None
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        if func in LEARN:
            leaf_of(args[0])  # it learns as the parameter does
    if func == GRADIENT and type(result) is DTensor:
        step.take(result)
    return result


def as_stored(run: Callable[..., Any], closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    """Runs what an optimizer does with a closure: within a step, too, it has parts, as it has between steps."""
    step, Part.step = Part.step, None

    def within() -> Any:
        Part.step = step
        try:
            return closure()
        finally:
            Part.step = None

    try:
        return run(within, *args, **kwargs)
    finally:
        Part.step = step
