"""Logits of which each rank has its own columns, behind the face of the whole tensor.

The user's code, or a model's own loss, does with them what it always does. What keeps columns apart (views, casts,
scaling, slicing positions) happens to a rank's own columns; `F.cross_entropy`, `torch.logsumexp` and `argmax` over the
vocabulary are computed from them; anything else gets the whole logits, gathered, with the right gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_map_only

from lightning_parallel.collectives.conjugate import join_parts
from lightning_parallel.techniques.tensor_parallel import loss
from lightning_parallel.techniques.tensor_parallel.loss import Columns

log = logging.getLogger(__name__)
aten = torch.ops.aten

Handler = Callable[..., Any]
_said: set[str] = set()


class DividedLogits(Tensor):
    """The whole logits for whoever looks at them; on this rank their columns `own`, along `dim`."""

    own: Tensor | None
    columns: Columns
    along: int
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, own: Tensor, along: int, columns: Columns) -> DividedLogits:  # noqa: D102
        shape = list(own.shape)
        shape[along] = columns.size
        make = cast(Callable[..., DividedLogits], Tensor._make_wrapper_subclass)
        made = make(cls, shape, dtype=own.dtype, device=own.device)
        made.own, made.along, made.columns, made._whole = own, along, columns, None
        return made

    @classmethod
    def of(cls, own: Tensor, size: int, group: dist.ProcessGroup) -> DividedLogits:
        """From this rank's columns, the last dimension."""
        return cls.along_dim(own, own.dim() - 1, Columns(size, group))

    @classmethod
    def along_dim(cls, own: Tensor, along: int, columns: Columns) -> DividedLogits:
        """From this rank's columns."""
        made = cast(DividedLogits, _Wrap.apply(own, along, columns))  # type: ignore[no-untyped-call]
        made.own = own  # with its history, which operations go on from
        return made

    def whole(self, reason: str = "") -> Tensor:
        """The gathered logits; all ranks of the group must call."""
        if self._whole is not None and (self._whole.requires_grad or not torch.is_grad_enabled()):
            return self._whole
        if reason and reason not in _said and self.columns.group.rank() == 0:
            _said.add(reason)
            log.info(
                "The logits are gathered from all tensor-parallel ranks for %s; F.cross_entropy, logsumexp and argmax "
                "over the vocabulary do without",
                reason,
            )
        assert self.own is not None
        self._whole = join_parts(self.own, self.along, self.columns.size, self.columns.group)
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA or (getattr(func, "__name__", "") == "__get__" and func not in TENSOR_PROPERTIES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        handler = HANDLERS.get(func)
        if handler is not None and isinstance(args[0], DividedLogits) and args[0].own is not None:
            result = handler(args[0], func, *args[1:], **kwargs)
            if result is not NotImplemented:
                return result
        gathered_args, gathered_kwargs = tree_map_only(
            DividedLogits, lambda logits: logits.whole(name), (tuple(args), kwargs)
        )
        result = func(*gathered_args, **gathered_kwargs)
        if _is_in_place(name) and args and isinstance(args[0], DividedLogits):
            args[0].own, args[0]._whole = None, gathered_args[0]  # from now on only the changed whole counts
            return args[0] if result is gathered_args[0] else result
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Reached below autograd only, from code that no `__torch_function__` sees.
        if func in (aten.detach.default, aten.alias.default) and args[0].own is not None:
            return cls(args[0].own.detach(), args[0].along, args[0].columns)
        name = getattr(func, "__name__", str(func))
        args, kwargs = tree_map_only(DividedLogits, lambda logits: logits.whole(name).detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


class _Wrap(Function):
    """So that autograd knows the wrapper too."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, along: int, columns: Columns) -> Tensor:
        ctx.along, ctx.columns = along, columns
        return DividedLogits(own.detach(), along, columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        columns: Columns = ctx.columns
        return gradient.narrow(ctx.along, columns.start, columns.stop - columns.start), None, None


def whole_logits(outputs: Any) -> Any:
    """What a step returns, with plain tensors for divided logits."""
    return tree_map_only(DividedLogits, lambda logits: logits.whole("what a step returns"), outputs)


# ---------------------------------------------------------------- what happens to a rank's own columns


def _on_own(logits: DividedLogits, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Operations on every element by itself, with numbers only."""
    if any(_is_varying(value) for value in (*args, *kwargs.values())) or not _stays_there(logits, args, kwargs):
        return NotImplemented
    assert logits.own is not None
    return DividedLogits.along_dim(func(logits.own, *args, **kwargs), logits.along, logits.columns)


def _is_varying(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.dim() > 0 or value.requires_grad)


def _stays_there(logits: DividedLogits, args: Any, kwargs: Any) -> bool:
    places = [value for value in (*args, *kwargs.values()) if isinstance(value, str | torch.device)]
    return all(torch.device(place).type == logits.device.type for place in places)


def _shaped(logits: DividedLogits, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Views and slices that leave the vocabulary a dimension of its own."""
    own, size = logits.own, logits.columns.size
    assert own is not None
    shadow = torch.empty(logits.shape, device="meta")
    stride = shadow.stride(logits.along)
    if size < 2 or any(isinstance(leaf, Tensor) for leaf in _leaves((args, kwargs))):
        return _masked(logits, func, args)
    result = func(shadow, *args, **kwargs)
    places = [i for i, (n, s) in enumerate(zip(result.shape, result.stride(), strict=True)) if (n, s) == (size, stride)]
    if len(places) != 1:
        return NotImplemented
    place = places[0]
    if func in RESHAPES:
        shape = list(result.shape)
        shape[place] = own.shape[logits.along]
        return DividedLogits.along_dim(own.reshape(shape), place, logits.columns)
    return DividedLogits.along_dim(func(own, *args, **kwargs), place, logits.columns)


def _masked(logits: DividedLogits, func: Any, args: Any) -> Any:
    """Positions chosen by one mask or index, as in `logits[mask]`."""
    if func is not Tensor.__getitem__ or not isinstance(args[0], Tensor) or logits.along != logits.dim() - 1:
        return NotImplemented
    used = args[0].dim() if args[0].dtype in (torch.bool, torch.uint8) else 1
    if used >= logits.dim():
        return NotImplemented
    assert logits.own is not None
    chosen = logits.own[args[0]]
    return DividedLogits.along_dim(chosen, chosen.dim() - 1, logits.columns)


def _leaves(values: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(values)


def _cross_entropy(
    logits: DividedLogits,
    func: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    of_classes = 1 if logits.dim() > 1 else 0
    old_style = size_average is not None or reduce is not None
    if logits.along != of_classes or target.is_floating_point() or old_style or isinstance(target, DividedLogits):
        return NotImplemented
    assert logits.own is not None
    own = logits.own.movedim(logits.along, -1)
    if own.shape[:-1] != target.shape:
        return NotImplemented  # torch says what is wrong
    return loss.cross_entropy(own, target, logits.columns, weight, ignore_index, reduction, label_smoothing)


def _log_sum_exp(logits: DividedLogits, func: Any, dim: Any, keepdim: bool = False) -> Any:
    if _only(dim, logits) != logits.along:
        return NotImplemented
    assert logits.own is not None
    result = loss.log_sum_exp(logits.own.movedim(logits.along, -1), logits.columns)
    return result.unsqueeze(logits.along) if keepdim else result


def _arg_max(logits: DividedLogits, func: Any, dim: Any = None, keepdim: bool = False) -> Any:
    if _only(dim, logits) != logits.along:
        return NotImplemented
    assert logits.own is not None
    result = loss.arg_max(logits.own.movedim(logits.along, -1), logits.columns)
    return result.unsqueeze(logits.along) if keepdim else result


def _only(dim: Any, logits: DividedLogits) -> int | None:
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    return dims[0] % logits.dim() if len(dims) == 1 and isinstance(dims[0], int) else None


def _is_in_place(name: str) -> bool:
    return (
        name == "__setitem__"
        or (name.startswith("__i") and name != "__invert__")
        or (name.endswith("_") and not name.endswith("__"))
    )


T = Tensor
METADATA = {T.size, T.dim, T.numel, T.nelement, T.__len__, T.is_floating_point, T.is_complex, T.stride, T.element_size,
            T.ndimension, T.is_contiguous, T.get_device, T.__hash__, torch.numel, torch.is_floating_point}  # fmt: skip
TENSOR_PROPERTIES = {T.T.__get__, T.mT.__get__, T.H.__get__, T.mH.__get__, T.data.__get__, T.real.__get__}  # type: ignore[attr-defined]
RESHAPES = {T.view, T.reshape, torch.reshape, T.flatten, torch.flatten, T.unflatten, T.contiguous}
SHAPES = {*RESHAPES, T.transpose, torch.transpose, T.permute, torch.permute, T.movedim, torch.movedim, T.squeeze,
          torch.squeeze, T.unsqueeze, torch.unsqueeze, T.__getitem__, T.narrow, torch.narrow, T.swapaxes}  # fmt: skip
ON_ELEMENTS = {T.float, T.double, T.half, T.bfloat16, T.to, T.type, T.clone, T.detach, T.neg, T.__neg__, T.tanh,
               torch.tanh, torch.neg, T.mul, T.__mul__, T.__rmul__, torch.mul, T.div, T.__truediv__, torch.div,
               T.true_divide, T.add, T.__add__, T.__radd__, T.sub, T.__sub__, T.clamp, torch.clamp}  # fmt: skip
HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(ON_ELEMENTS, _on_own),
    **dict.fromkeys(SHAPES, _shaped),
    **dict.fromkeys((T.logsumexp, torch.logsumexp), _log_sum_exp),
    **dict.fromkeys((T.argmax, torch.argmax), _arg_max),
    F.cross_entropy: _cross_entropy,
}
