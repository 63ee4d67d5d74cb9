"""A stacked parameter that looks whole, and of which a rank has the rows of its own experts.

The rows of other ranks' experts count as zeros: no token of theirs is here, so nothing reads them. Operations of which
a rule is known act on own rows; any other gets the whole with zeros in it: exact, and no message, but it costs memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_parallel.techniques.divided.python_functions import called_below
from lightning_parallel.techniques.divided.table import Rule, rule
from lightning_parallel.techniques.tools.means import original
from lightning_parallel.techniques.tools.telling import warn

OWN_RULES: dict[Any, Rule] = {}
"""What each operation does: `rule(func, args, kwargs)` returns the result, or NotImplemented for the whole."""


class OwnExperts(Tensor):
    """A stacked parameter, (experts, ...).

    Args:
        own: the rows of this rank's experts, a plain tensor with its history, (own experts, ...).
        first: the number of the first of them.
        count: how many experts there are on all ranks.
    """

    own: Tensor
    first: int

    @staticmethod
    def __new__(cls, own: Tensor, first: int, count: int) -> OwnExperts:  # noqa: D102
        made = _make(cls, (count, *own.shape[1:]), dtype=own.dtype, device=own.device)
        made.own, made.first = own, first
        return made

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether gradients flow to it."""
        return self.own.requires_grad

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether own rows are what gradients are kept for; who logs a step asks."""
        return self.own.is_leaf

    def expert(self, number: int) -> Tensor:
        """The row of one expert; zeros for one of another rank."""
        place = (number + len(self) if number < 0 else number) - self.first
        if 0 <= place < len(self.own):
            return self.own[place]
        return self.own.new_zeros(()).expand(self.own.shape[1:])

    def experts(self, numbers: Tensor) -> Tensor:
        """The rows of several experts, (*numbers, ...)."""
        places = numbers - self.first
        rows = self.own[places.clamp(0, len(self.own) - 1)]
        here = (places >= 0) & (places < len(self.own))
        return rows.where(here.view(*here.shape, *[1] * (rows.dim() - here.dim())), 0)

    def whole(self) -> Tensor:
        """All rows, zeros for experts of other ranks."""
        after = len(self) - self.first - len(self.own)
        return F.pad(self.own, (*[0, 0] * (self.own.dim() - 1), self.first, after))

    def __repr__(self) -> str:  # type: ignore[override]
        last = self.first + len(self.own) - 1
        return f"OwnExperts(shape={tuple(self.shape)}, this rank has {self.first}-{last})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = original(func), kwargs or {}
        if func in PLAIN:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        known = OWN_RULES.get(func)
        result = known(func, args, kwargs) if known is not None else NotImplemented
        if result is NotImplemented:
            operation = getattr(func, "__name__", str(func))
            if operation not in _TOLD:
                _TOLD.add(operation)
                warn(
                    f"{operation} on the stacked weights of experts has no rule under expert parallel: it gets the "
                    "weights of all experts, with zeros for those of other ranks, which costs their memory; index one "
                    "expert at a time, or use torch.nn.functional.grouped_mm"
                )
            args, kwargs = tree_map_only(OwnExperts, OwnExperts.whole, (tuple(args), kwargs))
            result = func(*args, **kwargs)
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Gives the whole to code that `__torch_function__` does not see, below autograd."""
        remedy = "give a torch.autograd.Function weight.clone()"
        return called_below(func, args, kwargs, OwnExperts, OwnExperts.whole, OF_EXPERTS, remedy)


OF_EXPERTS = "weights of experts of which other ranks hold some"
"""A tensor of which this rank has some rows, for errors."""

_make = cast(Callable[..., OwnExperts], Tensor._make_wrapper_subclass)

PLAIN = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_meta", "is_sparse")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.stride, Tensor.is_contiguous,
     Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.ndimension}  # fmt: skip
"""What a wrapper without memory answers for itself."""


_TOLD: set[str] = set()  # only spares a reader the same line again


# ---------------------------------------------------------------- rules


@rule(Tensor.__getitem__, table=OWN_RULES)
def _getitem(func: Any, args: Any, kwargs: Any) -> Any:
    stack, index = args
    first, *rest = index if isinstance(index, tuple) else (index,)
    if not isinstance(stack, OwnExperts) or first is None or first is Ellipsis or isinstance(first, bool):
        return NotImplemented
    if isinstance(first, slice) and first == slice(None) and all(isinstance(each, slice) for each in rest):
        return _again(stack, stack.own[(first, *rest)])
    if isinstance(first, Tensor) and (first.is_floating_point() or first.dtype in (torch.bool, torch.uint8)):
        return NotImplemented
    if isinstance(first, Tensor) and first.dim():
        rows = stack.experts(first)
        return rows if not rest else NotImplemented
    if not isinstance(first, (int, Tensor)):
        return NotImplemented
    row = stack.expert(int(first))
    return row[tuple(rest)] if rest else row


@rule(torch.unbind, Tensor.unbind, table=OWN_RULES)
def _unbind(func: Any, args: Any, kwargs: Any) -> Any:
    stack, *rest = args
    if rest or kwargs:
        return NotImplemented
    return tuple(map(stack.expert, range(len(stack))))


@rule(torch.transpose, Tensor.transpose, torch.permute, Tensor.permute, table=OWN_RULES)
def _transpose(func: Any, args: Any, kwargs: Any) -> Any:
    stack, *order = args
    dims = [dim % stack.dim() for dim in (order[0] if len(order) == 1 else order)]
    if kwargs or (0 in dims and dims[0] != 0) or (len(dims) == 2 and stack.dim() > 2 and 0 in dims):
        return NotImplemented
    return _again(stack, func(stack.own, *order))


@rule(
    *(vars(torch._C.TensorBase)["mT"].__get__, torch.clone, Tensor.to, Tensor.float, Tensor.double, Tensor.half),
    *(Tensor.bfloat16, Tensor.contiguous, Tensor.detach, Tensor.clone),
    table=OWN_RULES,
)
def _row_by_row(func: Any, args: Any, kwargs: Any) -> Any:
    stack, *rest = args
    if not isinstance(stack, OwnExperts):
        return NotImplemented
    return _again(stack, func(stack.own, *rest, **kwargs))


@rule(torch.chunk, Tensor.chunk, torch.split, Tensor.split, table=OWN_RULES)
def _split(func: Any, args: Any, kwargs: Any) -> Any:
    stack, *rest = args
    dim = kwargs["dim"] if "dim" in kwargs else rest[1] if len(rest) > 1 else 0
    if dim % stack.dim() == 0:
        return NotImplemented
    return tuple(_again(stack, piece) for piece in func(stack.own, *rest, **kwargs))


@rule(F.grouped_mm, torch._grouped_mm, table=OWN_RULES)
def _grouped_mm(func: Any, args: Any, kwargs: Any) -> Any:
    """Rows sorted by expert: those of own experts only, so all ends before them are 0."""
    rows, stack, *rest = args
    offsets = kwargs.get("offs", rest[0] if rest else None)
    if not isinstance(stack, OwnExperts) or isinstance(rows, OwnExperts) or offsets is None or len(rest) > 1:
        return NotImplemented
    own = offsets[stack.first : stack.first + len(stack.own)]
    others = {name: value for name, value in kwargs.items() if name != "offs"}
    return func(rows, stack.own, offs=own, **others)


def _again(stack: OwnExperts, own: Tensor) -> OwnExperts:
    return OwnExperts(own, stack.first, len(stack))
