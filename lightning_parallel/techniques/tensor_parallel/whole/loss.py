"""Losses from logits of which each rank has its own columns: the whole logits never exist.

With x the logits of a token and y its label, cross-entropy is log sum exp(x) - x[y]: two numbers a token, each a sum
over the ranks' columns (after the maximum, taken out so that nothing overflows).
Source: M. Shoeybi et al., Megatron-LM, 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.techniques.tools.means import mean_over
from lightning_parallel.techniques.tools.shards import bounds


@dataclass(frozen=True)
class Columns:
    """Which columns a rank has: from `start` to `stop` of `size`, the rest with others of the group."""

    size: int
    group: dist.ProcessGroup

    @property
    def start(self) -> int:
        """The first one."""
        return bounds(self.size, self.group.size(), self.group.rank())[0]

    @property
    def stop(self) -> int:
        """The one after the last."""
        return bounds(self.size, self.group.size(), self.group.rank())[1]


def cross_entropy(
    own: Tensor,
    target: Tensor,
    columns: Columns,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """What `F.cross_entropy` gives for the whole logits.

    Args:
        own: this rank's columns, (..., stop - start).
        target: the labels, (...), alike on all ranks.
        columns: where this rank's columns lie.
        weight: of the classes, (size), on every rank.
        ignore_index: as in torch.
        reduction: as in torch.
        label_smoothing: as in torch.

    Raises:
        IndexError: a label that is no class and not ignored.
    """
    counted = target != ignore_index
    check_numbers(target, columns.size, "Target", "classes", counted)
    label = target.masked_fill(~counted, 0)
    class_weights = own.new_ones(columns.size, dtype=torch.float32) if weight is None else weight
    all_weighted = class_weights[columns.start : columns.stop].to(_exact(own)) if label_smoothing else None
    total, at_label, weighted = _Sums.apply(own, label, columns, all_weighted)  # type: ignore[no-untyped-call]
    label_weight = class_weights.to(total.dtype)[label] * counted
    loss = (1 - label_smoothing) * (total - at_label) * label_weight
    if label_smoothing:
        smooth = total * class_weights.to(total.dtype).sum() - weighted
        loss = loss + label_smoothing / columns.size * smooth * counted
    if reduction == "none":
        return _as_torch(loss, own)
    if reduction == "mean":
        return mean_over(loss, label_weight.sum(), _as_torch(loss, own).dtype, of=target)
    return _as_torch(loss.sum(), own)


def log_sum_exp(own: Tensor, columns: Columns) -> Tensor:
    """The logarithm of the sum of exponentials over all columns, (...), as a z-loss needs it."""
    result: Tensor = _Sums.apply(own, None, columns, None)[0]  # type: ignore[no-untyped-call]
    return result.to(own.dtype)


@torch.no_grad()
def arg_max(own: Tensor, columns: Columns) -> Tensor:
    """The number of the largest logit among all columns, (...)."""
    if own.shape[-1]:
        value, index = own.max(-1)
    else:
        value, index = own.new_full(own.shape[:-1], -torch.inf), torch.zeros_like(own[..., :0].sum(-1)).long()
    largest = value.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=columns.group)
    winner = torch.where((value == largest) & (own.shape[-1] > 0), index + columns.start, columns.size)
    dist.all_reduce(winner, dist.ReduceOp.MIN, group=columns.group)
    return winner.clamp(max=columns.size - 1)


class _Sums(Function):
    """Log-sum-exp, the logit at the label, and a weighted sum of logits: what ranks add up."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, label: Tensor | None, columns: Columns, weights: Tensor | None) -> Any:
        exact = own.to(_exact(own))
        largest = exact.amax(-1) if own.shape[-1] else exact.new_full(own.shape[:-1], -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=columns.group)
        exponentials = (exact - largest[..., None]).exp_()
        place, here = _place(label, columns) if label is not None else (None, None)
        at_label = _take(exact, place, here) if place is not None and here is not None else None
        weighted = exact @ weights if weights is not None else None
        sums = [sum_ for sum_ in (exponentials.sum(-1), at_label, weighted) if sum_ is not None]
        message = torch.stack(sums)
        dist.all_reduce(message, group=columns.group)
        sums = list(message.unbind())
        total = sums.pop(0)
        ctx.save_for_backward(exponentials.div_(total[..., None]), place, here, weights)
        ctx.dtype = own.dtype
        return (
            total.log() + largest,
            sums.pop(0) if at_label is not None else None,
            sums.pop(0) if weighted is not None else None,
        )

    @staticmethod
    def backward(ctx: Any, of_total: Tensor, of_label: Tensor | None, of_weighted: Tensor | None) -> Any:
        probabilities, place, here, weights = ctx.saved_tensors
        gradient = probabilities * of_total[..., None]
        if place is not None and of_label is not None and gradient.shape[-1]:
            gradient.scatter_add_(-1, place[..., None], (of_label * here)[..., None])
        if weights is not None and of_weighted is not None:
            gradient += of_weighted[..., None] * weights
        return gradient.to(ctx.dtype), None, None, None


def _place(label: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    """Where the label's column is on this rank, and whether it is here at all."""
    here = (label >= columns.start) & (label < columns.stop)
    return (label - columns.start).masked_fill(~here, 0), here


def _take(x: Tensor, place: Tensor, here: Tensor) -> Tensor:
    if not x.shape[-1]:
        return x.new_zeros(x.shape[:-1])
    return x.gather(-1, place[..., None]).squeeze(-1).masked_fill(~here, 0)


def _exact(own: Tensor) -> torch.dtype:
    return torch.promote_types(own.dtype, torch.float32)


def _as_torch(loss: Tensor, own: Tensor) -> Tensor:
    """The dtype that torch gives: autocast leaves losses in single precision."""
    return loss if torch.is_autocast_enabled(own.device.type) else loss.to(own.dtype)


def check_numbers(numbers: Tensor, size: int, what: str, among: str, counted: Tensor | None = None) -> None:
    """Raises IndexError for a number that is not one of `size`; on a GPU the process ends, as with torch's own check.

    Args:
        numbers: of classes or rows.
        size: how many there are.
        what: the numbers are.
        among: what there are `size` of.
        counted: which of the numbers count, by default all.
    """
    wrong = (numbers < 0) | (numbers >= size)
    if counted is not None:
        wrong &= counted
    if numbers.device.type == "cpu" and bool(wrong.any()):
        raise IndexError(f"{what} {int(numbers[wrong][0])} is out of bounds: there are {size} {among}")
    if numbers.device.type != "cpu":
        torch._assert_async(~wrong.any())
