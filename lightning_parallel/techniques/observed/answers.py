"""Answers where code asks a tensor for values while it runs in shapes only: true, and ones of the right shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from lightning_parallel.techniques.observed.shapes import ShapesOnly

aten = torch.ops.aten

TO_PYTHON = {Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__format__, Tensor.__dlpack__}
"""Functions that hand values to Python; unlike `item` they look into memory, past every operation."""

ON_GRADIENTS = {Tensor.register_hook, Tensor.retain_grad}
"""Functions for tensors with a graph, of which there is none without values."""

QUANTILES = {torch.quantile, torch.nanquantile, Tensor.quantile, Tensor.nanquantile}
"""Functions that make a tensor of a number that they are given, and want it beside the other one."""

DEVICE: Any = vars(torch._C.TensorBase)["device"].__get__
REQUIRE: Any = vars(torch._C.TensorBase)["requires_grad"].__set__


def plausible(func: Any, args: Any) -> Any:
    """A plausible answer to an operation that asks for a value; None for operations that ask for none."""
    packet = func._overloadpacket
    if packet is aten._local_scalar_dense:
        return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
    if packet is aten.equal:
        return True
    if packet is aten.nonzero:
        return torch.zeros(1, args[0].dim(), dtype=torch.long)
    if packet is aten.masked_select:
        return torch.zeros(1, dtype=args[0].dtype)
    return None


class Answers(TorchFunctionMode):
    """Stands before PyTorch's functions while code runs in shapes only.

    Values that leave for Python are made up, gradients have shapes only too, and functions that want all tensors on one
    device, as recurrent layers do, get them there.

    Args:
        shapes: knows which tensors have no values.
    """

    def __init__(self, shapes: ShapesOnly) -> None:
        super().__init__()
        self._shapes, self._watch = shapes, shapes.watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in TO_PYTHON and not self._shapes.depends(args[0]):
            self._watch.touched(args[:1], ())
            self._watch.known(args[:1], None, asked=True)
        elif func in TO_PYTHON:
            self._shapes.tell_asked(args[0])
            return func(torch.ones(args[0].shape, dtype=args[0].dtype), *args[1:], **kwargs)
        if func == DEVICE:
            device = func(*args)
            return self._shapes.device if device.type == "meta" else device
        if func in ON_GRADIENTS and self._shapes.depends(args[0]):
            return None if func is Tensor.retain_grad else RemovableHandle(OrderedDict())
        if func is torch.autograd.grad:
            return self._gradients(*args, **kwargs)
        if func in (torch.autograd.backward, Tensor.backward):
            self._watch.differentiated(None)
            return None
        if func in (Tensor.requires_grad_, REQUIRE):
            self._watch.required(args[0])
        self._watch.called(func, args, kwargs)
        return self._on_one_device(func, args, kwargs)

    def _gradients(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        self._watch.differentiated(wanted)
        first = outputs if isinstance(outputs, Tensor) else next(iter(outputs))
        return tuple(tensor.detach() * first.detach().sum() for tensor in wanted)

    def _on_one_device(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Some functions compare devices in C++, before there is an operation to be seen."""
        if func in QUANTILES:
            args, kwargs = _with_tensor(args, kwargs)
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if all(leaf.is_meta for leaf in leaves) or not any(map(self._shapes.depends, leaves)):
                raise
            again = self._again(func, args, kwargs, lambda _: True)
            if again is None:  # lengths and indices are read where they lie
                again = self._again(func, args, kwargs, lambda leaf: leaf.is_floating_point() or leaf.is_complex())
            if again is None:
                raise
            return again[0]

    def _again(self, func: Any, args: Any, kwargs: Any, moved: Callable[[Tensor], bool]) -> tuple[Any] | None:
        def on_meta(leaf: Tensor) -> Tensor:
            return self._shapes.proxy(leaf) if moved(leaf) else leaf

        args, kwargs = pytree.tree_map_only(Tensor, on_meta, (args, kwargs))
        try:
            return (func(*args, **kwargs),)
        except (RuntimeError, NotImplementedError):
            return None


def _with_tensor(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a quantile, the number of which is a tensor."""
    by_name = dict(zip(("input", "q", "dim", "keepdim"), args, strict=False)) | kwargs
    if not isinstance(by_name["q"], Tensor):
        by_name["q"] = torch.tensor(by_name["q"], dtype=by_name["input"].dtype)
    tensor = by_name.pop("input")
    return (tensor,), by_name
