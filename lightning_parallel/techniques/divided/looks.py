"""What a divided tensor tells of itself: the shape of the whole, and otherwise what its own elements are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from typing_extensions import Self

from lightning_parallel.collectives.elements import Elements
from lightning_parallel.techniques.divided.table import Cuts


class LooksWhole(Tensor):
    """A tensor that answers questions for the whole of which this rank has some elements."""

    own: Tensor
    cuts: Cuts
    stored: Tensor | None
    """Of a parameter: the tensor that the module holds between steps, and that has the gradient."""
    _shape: torch.Size
    _known: tuple[Tensor, tuple[bool, int]] | None
    _gathers: dict[Any, Tensor] | None

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the whole."""
        return self.size() if torch._C._is_torch_function_mode_enabled() else self._shape

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
        for tensor in (self.own, self.stored):
            if tensor is not None:
                tensor.requires_grad_(value)

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
        if torch._C._is_torch_function_mode_enabled():
            return _told(LooksWhole.size, self, *(() if dim is None else (dim,)))
        return self._shape if dim is None else self._shape[dim]

    def numel(self) -> int:
        """How many elements the whole has."""
        if torch._C._is_torch_function_mode_enabled():
            return int(_told(LooksWhole.numel, self))
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

    def forget(self) -> None:
        """Lets go of what was gathered, after an operation changed the elements in place."""
        self._gathers = self._known = None

    @property
    def only(self) -> Elements:
        """The elements of the first divided dimension."""
        return next(iter(self.cuts.values()))

    def __repr__(self) -> str:  # type: ignore[override]
        if not self.cuts:  # without a collective: ranks may print alone
            return repr(self.own)
        here = ", ".join(f"dim {dim}: {elements!r}" for dim, elements in self.cuts.items())
        return f"Divided(shape={tuple(self._shape)}, dtype={self.dtype}, this rank has {here})"


def _told(question: Callable[..., Any], tensor: Tensor, *args: Any) -> Any:
    """The answer to a question about a whole, with a word to modes of torch that look at what a step asks."""
    return handle_torch_function(question, (tensor,), tensor, *args)


def asking_at_once(method: Any) -> Callable[..., Any]:
    """A method that torch has written in Python, of which the tensor is the one argument that may have rules.

    Torch would look through all arguments for others that have some, which takes longer than what rules do.
    """

    @functools.wraps(method)
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_torch_function_unary(self) or torch._C._is_torch_function_mode_enabled():
            return method(self, *args, **kwargs)
        return type(self).__torch_function__(method, (), (self, *args), kwargs)

    return ask


def strides_of(divided: LooksWhole) -> list[int] | None:
    """The strides of the whole, which lies in memory in the order in which own elements do; None: as dimensions do.

    That is so where ranks may differ. What views leave out is not seen: a slice lies as densely as a copy of it. A
    dimension that was expanded has the stride 0.
    """
    if torch.compiler.is_dynamo_compiling() or divided.own.is_contiguous():
        return None
    if not all(min(e.lengths) > 1 and len({*map(len, e.runs)}) == 1 for e in divided.cuts.values()):
        return None
    own, step = divided.own.stride(), 1
    strides = [0] * len(own)
    for dim in sorted(range(len(own)), key=lambda dim: (own[dim], -dim)):
        if own[dim] or divided.shape[dim] == 1:
            strides[dim] = step
            step *= divided.shape[dim]
    return strides


def laid_out(whole: Tensor, divided: LooksWhole) -> Tensor:
    """The whole in memory as it is told to lie there, for who reads it by strides, as `as_strided` does."""
    strides = strides_of(divided)
    if strides is None or whole.stride() == (*strides,):
        return whole
    for dim, stride in enumerate(strides):
        whole = whole if stride else whole.narrow(dim, 0, 1)
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    turned = whole.permute(order).contiguous()
    return turned.permute([order.index(dim) for dim in range(len(order))]).expand(divided.shape)


def state_of(tensor: Tensor) -> tuple[bool, int]:
    """Whether it learns, and how often its memory was changed in place; in graphs, where that is no constant, 0."""
    return tensor.requires_grad, 0 if torch.compiler.is_dynamo_compiling() else tensor._version
