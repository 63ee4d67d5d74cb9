"""Metadata of a `Divided` tensor: it has the shape of the full tensor, and otherwise the properties of its shard."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from typing_extensions import Self

from lightning_parallel.collectives.derived_cache import Version, version
from lightning_parallel.collectives.elements import Elements
from lightning_parallel.techniques.divided.table import Cuts
from lightning_parallel.techniques.tools.leaves import autograd_leaf


class FullShapeTensor(Tensor):
    """Tensor with the metadata of the full tensor of which this rank holds a local shard; base of `Divided`."""

    own: Tensor
    cuts: Cuts
    stored: Tensor | None
    """For a parameter: the tensor that the module holds between steps, which has the gradient."""
    form: Any
    _shape: torch.Size
    _known: tuple[Tensor, tuple[bool, Version]] | None
    _gathers: dict[Any, Tensor] | None

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the full tensor."""
        return self.size() if _function_mode_is_active() else self._shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The number of dimensions."""
        return len(self._shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of its elements."""
        return self.own.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of the local shard."""
        return self.own.device

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow to the tensor."""
        return self.own.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        (self.own if self.stored is None else self.stored).requires_grad_(value)
        if self.stored is not None:
            autograd_leaf(self.stored)  # gives the local shard the same `requires_grad`

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether the tensor has no autograd history."""
        return self.own.is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """The autograd node that computed the tensor."""
        return self.own.grad_fn

    def dim(self) -> int:
        """See `ndim`."""
        return len(self._shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the size of the full tensor, or of one dimension of it."""
        if _function_mode_is_active():
            return handle_torch_function(FullShapeTensor.size, (self,), self, *(() if dim is None else (dim,)))
        return self._shape if dim is None else self._shape[dim]

    def numel(self) -> int:
        """Return the number of elements of the full tensor."""
        if _function_mode_is_active():
            return int(handle_torch_function(FullShapeTensor.numel, (self,), self))
        return self._shape.numel()

    def __len__(self) -> int:
        return int(self.size(0))

    @property
    def gathers(self) -> dict[Any, Tensor]:
        """Gathered tensors, kept for operations that read them again: by dimension, state of the shard, and dtype."""
        if self._gathers is None:
            self._gathers = {}
        return self._gathers

    def with_full(self, whole: Tensor) -> Self:
        """Note the full tensor, if each rank has it anyway and it requires no gradient; return the tensor itself."""
        self._known = whole, state_of(self.own)
        return self

    @property
    def known(self) -> Tensor | None:
        """The full tensor if each rank has it at no cost, as a batch; None once the local shard was changed."""
        if self._known is None or self._known[1] != state_of(self.own):
            return None
        return self._known[0]

    def note_change(self) -> None:
        """Note that an operation changed the local shard in place."""
        self.forget()

    def forget(self) -> None:
        """Drop the gathered tensors."""
        self._known = None
        if self._gathers is not None:
            self._gathers.clear()

    @property
    def only(self) -> Elements:
        """The elements of the first sharded dimension."""
        return next(iter(self.cuts.values()))

    def __repr__(self) -> str:  # type: ignore[override]
        # without a gather, as one rank may print alone
        here = ", ".join(f"dim {dim}: {elements!r}" for dim, elements in self.cuts.items())
        return f"Divided(shape={tuple(self._shape)}, dtype={self.dtype}, this rank has {here})"


def _function_mode_is_active() -> bool:
    """Whether a `TorchFunctionMode` is active; always False while a compiler traces, where sizes are plain numbers."""
    return torch._C._is_torch_function_mode_enabled() and not torch.compiler.is_dynamo_compiling()


def dispatch_fast(method: Any) -> Callable[..., Any]:
    """Wrap a method of which the tensor is the only argument that may have rules, to dispatch it faster.

    Torch would search all arguments for others with `__torch_function__`, which takes as long as the rules.
    """

    @functools.wraps(method)
    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_torch_function_unary(self) or torch._C._is_torch_function_mode_enabled():
            return method(self, *args, **kwargs)
        return type(self).__torch_function__(method, (), (self, *args), kwargs)

    return dispatch


FAST_METHODS = [dispatch_fast(method) for method in (
    Tensor.split, Tensor.unflatten, Tensor.norm, Tensor.transpose, Tensor.flatten, Tensor.view, Tensor.reshape,
    Tensor.permute, Tensor.contiguous)]  # fmt: skip
"""Methods that `Wrapper` overrides by faster ones."""


def with_layout(whole: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the full tensor with the memory order of dimensions that these strides have; stride 0 repeats elements."""
    shape, order = whole.shape, sorted(range(whole.dim()), key=lambda dim: (-stride[dim], dim))
    for dim, step in enumerate(stride):
        whole = whole.narrow(dim, 0, 1) if step == 0 and shape[dim] > 1 else whole
    if order != list(range(whole.dim())):
        whole = whole.permute(order).contiguous().permute([order.index(dim) for dim in range(whole.dim())])
    return whole.expand(shape) if whole.shape != shape else whole


def layout_is_unknown(divided: FullShapeTensor) -> bool:
    """Whether, in a graph, the shard of some rank does not show if a view of the full tensor is possible."""
    lengths = [elements.lengths for elements in divided.cuts.values()]
    return torch.compiler.is_dynamo_compiling() and not all(min(each) > 1 and len({*each}) == 1 for each in lengths)


def as_no_view(made: Tensor) -> Tensor:
    """Turn the result of a composite operation, a view of a temporary, into a tensor that is no view."""
    if torch.compiler.is_dynamo_compiling() or not made._is_view():
        return made
    not_a_view: Tensor = torch.ops.aten._unsafe_view(made, made.shape)
    return not_a_view


# ---------------------------------------------------------------- which results share memory on one device


class Layout(NamedTuple):
    """Memory layout of a result on one device: its stride, and whether it is a view of an argument."""

    stride: tuple[int, ...]
    is_view: bool


def layouts_of(func: Any, args: Any, kwargs: Any) -> list[Layout | None] | None:
    """Run an operation on meta tensors with the layout of the full ones; None if its result depends on values."""
    ids: set[int] = set()

    def meta(tensor: Tensor) -> Tensor:
        stride = tensor.form.stride if isinstance(tensor, FullShapeTensor) else tensor.stride()
        empty = torch.empty_strided(tensor.shape, stride, device="meta", dtype=tensor.dtype)
        ids.add(memory_of(empty))
        return empty

    try:
        metas = tree_map_only(Tensor, meta, (args, kwargs))
        # Modes such as selective checkpoints must not count this: it does not run again in a recomputation.
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            result = func(*metas[0], **metas[1])
    except Exception:  # an error in the arguments was raised by the rule before
        return None
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [Layout(each.stride(), memory_of(each) in ids) if isinstance(each, Tensor) else None for each in results]


def layout_key(value: Any) -> Any:
    """Return what determines the layout of a result: the form or layout of a tensor, the value of anything else."""
    if isinstance(value, Tensor):
        layout = value.form if isinstance(value, FullShapeTensor) else (value.shape, value.stride())
        return layout, value.dtype
    if isinstance(value, (tuple, list)):
        return type(value), *map(layout_key, value)
    if isinstance(value, slice):
        return slice, value.start, value.stop, value.step
    return type(value), value


def memory_of(tensor: Tensor) -> int:
    """Return a number that identifies the memory of a tensor."""
    return int(tensor.untyped_storage()._cdata)


def state_of(tensor: Tensor) -> tuple[bool, Version]:
    """Return whether a tensor requires a gradient, and the version of its values."""
    return tensor.requires_grad, version(tensor)
