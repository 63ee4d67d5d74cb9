"""A stacked parameter with the shape of all experts, of which each rank has the rows of its local experts.

The rows of other experts count as zeros: their tokens are on other ranks, so nothing reads them. Operations with a rule
act on the local rows; others get the full tensor with zeros: exact, without communication, but it costs memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_parallel.techniques.divided.python_functions import run_below_autograd
from lightning_parallel.techniques.divided.table import Rule, rule
from lightning_parallel.techniques.tools.means import original
from lightning_parallel.techniques.tools.user_warnings import warn

OWN_RULES: dict[Any, Rule] = {}
"""Rules by operation: `rule(func, args, kwargs)` returns the result, or NotImplemented to use the full tensor."""


class LocalExperts(Tensor):
    """A stacked parameter, (experts, ...), inside the forward of the module of experts.

    Args:
        own: the rows of the local experts, a plain tensor with autograd history, (local experts, ...).
        first: index of the first local expert.
        count: number of experts on all ranks.
    """

    own: Tensor
    first: int

    @staticmethod
    def __new__(cls, own: Tensor, first: int, count: int) -> LocalExperts:  # noqa: D102
        make: Any = Tensor._make_wrapper_subclass
        wrapper: LocalExperts = make(cls, (count, *own.shape[1:]), dtype=own.dtype, device=own.device)
        wrapper.own, wrapper.first = own, first
        return wrapper

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the local rows require a gradient."""
        return self.own.requires_grad

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether the local rows are a leaf of autograd; read where a step is logged."""
        return self.own.is_leaf

    def expert(self, number: int) -> Tensor:
        """Return the row of one expert, zeros if it is on another rank."""
        row = (number + len(self) if number < 0 else number) - self.first
        if 0 <= row < len(self.own):
            return self.own[row]
        return self.own.new_zeros(()).expand(self.own.shape[1:])

    def experts(self, numbers: Tensor) -> Tensor:
        """Return the rows of several experts, (*numbers, ...), zeros for those on other ranks."""
        indices = numbers - self.first
        rows = self.own[indices.clamp(0, len(self.own) - 1)]
        is_local = (indices >= 0) & (indices < len(self.own))
        return rows.where(is_local.view(*is_local.shape, *[1] * (rows.dim() - is_local.dim())), 0)

    def whole(self) -> Tensor:
        """Return all rows, zeros for experts on other ranks."""
        after = len(self) - self.first - len(self.own)
        return F.pad(self.own, (*[0, 0] * (self.own.dim() - 1), self.first, after))

    def __repr__(self) -> str:  # type: ignore[override]
        last = self.first + len(self.own) - 1
        return f"LocalExperts(shape={tuple(self.shape)}, this rank has {self.first}-{last})"

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
                    f"{operation} has no rule for the stacked weights of experts under expert parallel. It gets the "
                    "weights of all experts, with zeros for those on other ranks, which costs their memory; index one "
                    "expert at a time, or use torch.nn.functional.grouped_mm"
                )
            args, kwargs = tree_map_only(LocalExperts, LocalExperts.whole, (tuple(args), kwargs))
            result = func(*args, **kwargs)
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run operations that `__torch_function__` does not see, below autograd, on full tensors."""
        remedy = "give a torch.autograd.Function weight.clone()"
        return run_below_autograd(func, args, kwargs, LocalExperts, LocalExperts.whole, OF_EXPERTS, remedy)


OF_EXPERTS = "sharded weights of experts"
"""What an `LocalExperts` tensor is called in error messages."""

PLAIN = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_meta", "is_sparse")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.stride, Tensor.is_contiguous,
     Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.ndimension}  # fmt: skip
"""Operations that a wrapper without memory can answer: they read its metadata only."""


_TOLD: set[str] = set()  # operations that were warned of, so that each is once


# ---------------------------------------------------------------- rules


@rule(Tensor.__getitem__, table=OWN_RULES)
def _getitem(func: Any, args: Any, kwargs: Any) -> Any:
    stack, index = args
    first, *rest = index if isinstance(index, tuple) else (index,)
    if not isinstance(stack, LocalExperts) or first is None or first is Ellipsis or isinstance(first, bool):
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
    if not isinstance(stack, LocalExperts):
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
    """Rows are sorted by expert and belong to local experts only, so the offsets of experts before these are 0."""
    rows, stack, *rest = args
    offsets = kwargs.get("offs", rest[0] if rest else None)
    if not isinstance(stack, LocalExperts) or isinstance(rows, LocalExperts) or offsets is None or len(rest) > 1:
        return NotImplemented
    local_offsets = offsets[stack.first : stack.first + len(stack.own)]
    options = {name: value for name, value in kwargs.items() if name != "offs"}
    return func(rows, stack.own, offs=local_offsets, **options)


def _again(stack: LocalExperts, own: Tensor) -> LocalExperts:
    return LocalExperts(own, stack.first, len(stack))
