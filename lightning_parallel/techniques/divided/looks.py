"""What a divided tensor tells of itself: the shape of the whole, and otherwise what its own elements are."""

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

from lightning_parallel.collectives.elements import Elements
from lightning_parallel.collectives.made_of import Version, version
from lightning_parallel.techniques.divided.table import Cuts
from lightning_parallel.techniques.tools.leaves import leaf_of


class LooksWhole(Tensor):
    """A tensor that answers questions for the whole of which this rank has some elements."""

    own: Tensor
    cuts: Cuts
    stored: Tensor | None
    """Of a parameter: the tensor that the module holds between steps, and that has the gradient."""
    form: Any
    _shape: torch.Size
    _known: tuple[Tensor, tuple[bool, Version]] | None
    _gathers: dict[Any, Tensor] | None

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the whole."""
        return self.size() if _is_listened_to() else self._shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """How many dimensions."""
        return len(self._shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of its elements."""
        return self.own.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device on which this rank has its elements."""
        return self.own.device

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow to it."""
        return self.own.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        (self.own if self.stored is None else self.stored).requires_grad_(value)
        if self.stored is not None:
            leaf_of(self.stored)  # the own elements learn as it does

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether it has no history."""
        return self.own.is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """The end of its history."""
        return self.own.grad_fn

    def dim(self) -> int:
        """See `ndim`."""
        return len(self._shape)

    def size(self, dim: int | None = None) -> Any:
        """The size of the whole, or of one dimension of it."""
        if _is_listened_to():
            return handle_torch_function(LooksWhole.size, (self,), self, *(() if dim is None else (dim,)))
        return self._shape if dim is None else self._shape[dim]

    def numel(self) -> int:
        """How many elements the whole has."""
        if _is_listened_to():
            return int(handle_torch_function(LooksWhole.numel, (self,), self))
        return self._shape.numel()

    def __len__(self) -> int:
        return int(self.size(0))

    @property
    def gathers(self) -> dict[Any, Tensor]:
        """What was gathered for products that read it: by dimension, whether with gradients, and dtype."""
        if self._gathers is None:
            self._gathers = {}
        return self._gathers

    def known_to_be(self, whole: Tensor) -> Self:
        """Itself, of which this rank has all elements beside its own; nothing learns them."""
        self._known = whole, state_of(self.own)
        return self

    @property
    def known(self) -> Tensor | None:
        """The whole, where each rank has it at no cost, as that of a batch; None once something changed it."""
        if self._known is None or self._known[1] != state_of(self.own):
            return None
        return self._known[0]

    def note_change(self) -> None:
        """Notes that an operation changed the elements in place."""
        self.forget()

    def forget(self) -> None:
        """Lets go of what was gathered."""
        self._known = None
        if self._gathers is not None:
            self._gathers.clear()

    @property
    def only(self) -> Elements:
        """The elements of the first divided dimension."""
        return next(iter(self.cuts.values()))

    def __repr__(self) -> str:  # type: ignore[override]
        if not self.cuts:  # without a collective: ranks may print alone
            return repr(self.own)
        here = ", ".join(f"dim {dim}: {elements!r}" for dim, elements in self.cuts.items())
        return f"Divided(shape={tuple(self._shape)}, dtype={self.dtype}, this rank has {here})"


def _is_listened_to() -> bool:
    """Whether modes hear what is asked; in a graph these are numbers."""
    return torch._C._is_torch_function_mode_enabled() and not torch.compiler.is_dynamo_compiling()


def asking_at_once(method: Any) -> Callable[..., Any]:
    """A method of which the tensor is the one argument that may have rules.

    Torch would look through all arguments for others that have some, which takes as long as what rules do.
    """

    @functools.wraps(method)
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_torch_function_unary(self) or torch._C._is_torch_function_mode_enabled():
            return method(self, *args, **kwargs)
        return type(self).__torch_function__(method, (), (self, *args), kwargs)

    return ask


AT_ONCE = [asking_at_once(method) for method in (
    Tensor.split, Tensor.unflatten, Tensor.norm, Tensor.transpose, Tensor.flatten, Tensor.view, Tensor.reshape,
    Tensor.permute, Tensor.contiguous)]  # fmt: skip
"""Methods that the form without memory has itself."""


def laid_out(whole: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The whole with its dimensions in memory in the order that these strides have; stride 0 repeats elements."""
    shape, order = whole.shape, sorted(range(whole.dim()), key=lambda dim: (-stride[dim], dim))
    for dim, step in enumerate(stride):
        whole = whole.narrow(dim, 0, 1) if step == 0 and shape[dim] > 1 else whole
    if order != list(range(whole.dim())):
        whole = whole.permute(order).contiguous().permute([order.index(dim) for dim in range(whole.dim())])
    return whole.expand(shape) if whole.shape != shape else whole


def hides_layout(divided: LooksWhole) -> bool:
    """Whether, in a graph, the elements of some rank do not tell if a view of the whole is possible."""
    lengths = [elements.lengths for elements in divided.cuts.values()]
    return torch.compiler.is_dynamo_compiling() and not all(min(each) > 1 and len({*each}) == 1 for each in lengths)


def no_view(made: Tensor) -> Tensor:
    """What an operation of several has made, of which the last made a view that nobody else has, as one of its own."""
    if torch.compiler.is_dynamo_compiling() or not made._is_view():
        return made
    found: Tensor = torch.ops.aten._unsafe_view(made, made.shape)
    return found


# ---------------------------------------------------------------- what shares memory on one device


class Layout(NamedTuple):
    """How a result lies in memory on one device: its stride, and whether it is a view of an argument."""

    stride: tuple[int, ...]
    is_view: bool


def layouts_of(func: Any, args: Any, kwargs: Any) -> list[Layout | None] | None:
    """Run an operation on tensors without memory that lie as the wholes do; None where values decide its result."""
    given: set[int] = set()

    def meta(tensor: Tensor) -> Tensor:
        stride = tensor.form.stride if isinstance(tensor, LooksWhole) else tensor.stride()
        made = torch.empty_strided(tensor.shape, stride, device="meta", dtype=tensor.dtype)
        given.add(memory_of(made))
        return made

    try:
        metas = tree_map_only(Tensor, meta, (args, kwargs))
        # Modes of others, as selective checkpoints, are not to count this: it does not run when things are recomputed.
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            result = func(*metas[0], **metas[1])
    except Exception:  # what is wrong with the arguments the rule itself has said
        return None
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [Layout(each.stride(), memory_of(each) in given) if isinstance(each, Tensor) else None for each in results]


def known_by(value: Any) -> Any:
    """What decides how a result lies, of an argument: the form or layout of a tensor, and the value of what is none."""
    if isinstance(value, Tensor):
        looks = value.form if isinstance(value, LooksWhole) else (value.shape, value.stride())
        return looks, value.dtype
    if isinstance(value, (tuple, list)):
        return type(value), *map(known_by, value)
    if isinstance(value, slice):
        return slice, value.start, value.stop, value.step
    return type(value), value


def memory_of(tensor: Tensor) -> int:
    """Stands for the memory of a tensor."""
    return int(tensor.untyped_storage()._cdata)


def state_of(tensor: Tensor) -> tuple[bool, Version]:
    """Whether it learns, and the version of its values."""
    return tensor.requires_grad, version(tensor)
