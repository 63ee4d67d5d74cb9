"""Tensors of which each rank has its own part, behind the face of the whole.

Code that knows them takes the part. Code that does not gets the whole, gathered, with the right gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_map_only
from typing_extensions import Self

from lightning_parallel.collectives.conjugate import join_parts, own_part

log = logging.getLogger(__name__)
aten = torch.ops.aten

Handler = Callable[..., Any]
_said: set[tuple[type, str]] = set()  # what the log has been told of already in this process


class DividedTensor(Tensor):
    """The whole tensor for whoever looks at it; on this rank its part `own`, along one dimension.

    Attributes:
        own: this rank's part, with its history; None once the whole was changed in place.
        along: the dimension that is divided.
        length: the size of the whole along it.
        group: the ranks that have the parts.
    """

    own: Tensor | None
    along: int
    length: int
    group: dist.ProcessGroup
    _whole: Tensor | None

    HANDLERS: ClassVar[Mapping[Any, Handler]] = {}
    GATHERED: ClassVar[str]
    """What the log says when operations need the whole, with `{}` for them."""

    @staticmethod
    def __new__(cls, own: Tensor, along: int, length: int, group: dist.ProcessGroup) -> Self:  # noqa: D102
        shape = list(own.shape)
        shape[along] = length
        make = cast(Callable[..., Self], Tensor._make_wrapper_subclass)
        made = make(cls, shape, dtype=own.dtype, device=own.device)
        made.own, made.along, made.length, made.group, made._whole = own, along, length, group, None
        return made

    @classmethod
    def along_dim(cls, own: Tensor, along: int, length: int, group: dist.ProcessGroup) -> Self:
        """From this rank's part."""
        made = cast(Self, _Wrap.apply(cls, own, along, length, group))  # type: ignore[no-untyped-call]
        made.own = own  # with its history, which operations go on from
        return made

    def part(self) -> Tensor:
        """This rank's part, with its history; all ranks of the group must call."""
        if self.own is None:
            assert self._whole is not None
            return self._whole
        if self.requires_grad and not self.own.requires_grad and torch.is_grad_enabled():
            part: Tensor = _Unwrap.apply(self, self.own)  # type: ignore[no-untyped-call]
            return part
        return self.own

    def whole(self, reason: str = "") -> Tensor:
        """The gathered tensor; all ranks of the group must call."""
        if self._whole is not None and (self._whole.requires_grad or not torch.is_grad_enabled()):
            return self._whole
        if reason and (type(self), reason) not in _said and self.group.rank() == 0:
            _said.add((type(self), reason))
            log.info(self.GATHERED.format(reason))
        assert self.own is not None
        self._whole = join_parts(self.part(), self.along, self.length, self.group)
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA or (getattr(func, "__name__", "") == "__get__" and func not in TENSOR_PROPERTIES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        first = args[0] if args and isinstance(args[0], DividedTensor) else None
        handler = first.HANDLERS.get(func) if first is not None and first.own is not None else None
        if handler is not None:
            result = handler(first, func, *args[1:], **kwargs)
            if result is not NotImplemented:
                return result
        gathered_args, gathered_kwargs = tree_map_only(DividedTensor, lambda t: t.whole(name), (tuple(args), kwargs))
        result = func(*gathered_args, **gathered_kwargs)
        if first is not None and _is_in_place(name):
            first.own, first._whole = None, gathered_args[0]  # from now on only the changed whole counts
            return first if result is gathered_args[0] else result
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Reached below autograd only, from code that no `__torch_function__` sees.
        first: Any = args[0] if args else None
        if func in (aten.detach.default, aten.alias.default) and first.own is not None:
            return type(first)(first.own.detach(), first.along, first.length, first.group)
        name = getattr(func, "__name__", str(func))
        args, kwargs = tree_map_only(DividedTensor, lambda t: t.whole(name).detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


class _Wrap(Function):
    """So that autograd knows the wrapper too."""

    @staticmethod
    def forward(ctx: Any, kind: Any, own: Tensor, along: int, length: int, group: dist.ProcessGroup) -> Tensor:
        ctx.along, ctx.size, ctx.group = along, own.shape[along], group
        made: Tensor = kind(own.detach(), along, length, group)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        part = own_part(gradient, ctx.along, ctx.group)
        return None, part.narrow(ctx.along, 0, ctx.size), None, None, None


class _Unwrap(Function):
    """From a wrapper that autograd made a leaf or a result of its own: its part has no history."""

    @staticmethod
    def forward(ctx: Any, wrapper: DividedTensor, own: Tensor) -> Tensor:
        ctx.along, ctx.length, ctx.group = wrapper.along, wrapper.length, wrapper.group
        return own.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return join_parts(gradient, ctx.along, ctx.length, ctx.group), None


def whole_tensors(outputs: Any) -> Any:
    """What a step returns, with plain tensors for divided ones."""
    return tree_map_only(DividedTensor, lambda divided: divided.whole("what a step returns"), outputs)


def _is_in_place(name: str) -> bool:
    return (
        name == "__setitem__"
        or (name.startswith("__i") and name != "__invert__")
        or (name.endswith("_") and not name.endswith("__"))
    )


T = Tensor
METADATA = {T.size, T.dim, T.numel, T.nelement, T.__len__, T.is_floating_point, T.is_complex, T.stride, T.element_size,
            T.ndimension, T.is_contiguous, T.get_device, T.__hash__, torch.numel, torch.is_floating_point,
            T.requires_grad_, T.backward, torch.autograd.backward, torch.autograd.grad}  # fmt: skip
TENSOR_PROPERTIES = {T.T.__get__, T.mT.__get__, T.H.__get__, T.mH.__get__, T.data.__get__, T.real.__get__}  # type: ignore[attr-defined]
