"""Logits of which each rank has its own columns, behind the face of the whole tensor.

The user's code, or a model's own loss, does with them what it always does. What keeps columns apart (views, casts,
scaling, slicing positions) happens to a rank's own columns; `F.cross_entropy`, `torch.logsumexp` and `argmax` over the
vocabulary are computed from them; anything else gets the whole logits, gathered, with the right gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.techniques.tensor_parallel.whole import loss
from lightning_parallel.techniques.tensor_parallel.whole.divided_tensor import DividedTensor
from lightning_parallel.techniques.tensor_parallel.whole.loss import Columns


class DividedLogits(DividedTensor):
    """The whole logits for whoever looks at them; on this rank their columns, some of the vocabulary."""

    GATHERED = (
        "The logits are gathered from all tensor-parallel ranks for {}; F.cross_entropy, logsumexp and argmax over the "
        "vocabulary do without"
    )

    @classmethod
    def of(cls, own: Tensor, size: int, group: dist.ProcessGroup) -> DividedLogits:
        """From this rank's columns, the last dimension."""
        return cls.along_dim(own, own.dim() - 1, size, group)

    @property
    def columns(self) -> Columns:
        """Which ones this rank has."""
        return Columns(self.length, self.group)

    def with_own(self, own: Tensor, along: int) -> DividedLogits:
        """Others, made of the same columns."""
        return self.along_dim(own, along, self.length, self.group)


# ---------------------------------------------------------------- what happens to a rank's own columns


def _on_own(logits: DividedLogits, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Operations on every element by itself, with numbers only."""
    if any(_is_varying(value) for value in (*args, *kwargs.values())) or not _stays_there(logits, args, kwargs):
        return NotImplemented
    assert logits.own is not None
    return logits.with_own(func(logits.own, *args, **kwargs), logits.along)


def _is_varying(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.dim() > 0 or value.requires_grad)


def _stays_there(logits: DividedLogits, args: Any, kwargs: Any) -> bool:
    places = [value for value in (*args, *kwargs.values()) if isinstance(value, str | torch.device)]
    return all(torch.device(place).type == logits.device.type for place in places)


def _shaped(logits: DividedLogits, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Views and slices that leave the vocabulary a dimension of its own."""
    own, size = logits.own, logits.length
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
        return logits.with_own(own.reshape(shape), place)
    return logits.with_own(func(own, *args, **kwargs), place)


def _masked(logits: DividedLogits, func: Any, args: Any) -> Any:
    """Positions chosen by one mask or index, as in `logits[mask]`."""
    if func is not Tensor.__getitem__ or not isinstance(args[0], Tensor) or logits.along != logits.dim() - 1:
        return NotImplemented
    used = args[0].dim() if args[0].dtype in (torch.bool, torch.uint8) else 1
    if used >= logits.dim():
        return NotImplemented
    assert logits.own is not None
    chosen = logits.own[args[0]]
    return logits.with_own(chosen, chosen.dim() - 1)


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


T = Tensor
RESHAPES = {T.view, T.reshape, torch.reshape, T.flatten, torch.flatten, T.unflatten, T.contiguous}
SHAPES = {*RESHAPES, T.transpose, torch.transpose, T.permute, torch.permute, T.movedim, torch.movedim, T.squeeze,
          torch.squeeze, T.unsqueeze, torch.unsqueeze, T.__getitem__, T.narrow, torch.narrow, T.swapaxes}  # fmt: skip
ON_ELEMENTS = {T.float, T.double, T.half, T.bfloat16, T.to, T.type, T.clone, T.detach, T.neg, T.__neg__, T.tanh,
               torch.tanh, torch.neg, T.mul, T.__mul__, T.__rmul__, torch.mul, T.div, T.__truediv__, torch.div,
               T.true_divide, T.add, T.__add__, T.__radd__, T.sub, T.__sub__, T.clamp, torch.clamp}  # fmt: skip
DividedLogits.HANDLERS = {
    **dict.fromkeys(ON_ELEMENTS, _on_own),
    **dict.fromkeys(SHAPES, _shaped),
    **dict.fromkeys((T.logsumexp, torch.logsumexp), _log_sum_exp),
    **dict.fromkeys((T.argmax, torch.argmax), _arg_max),
    F.cross_entropy: _cross_entropy,
}
