"""Values of a whole batch from those of all ranks, in one message of numbers that are added up.

A mean v of rank r is a sum of multiples of losses that count by their targets (`Mean`), and of a rest that counts by
samples: v_r = rest_r + sum_k part_kr. Rank r has w_r samples, and loss k of it is over c_kr targets. Over all R ranks

    value = sum_r w_r rest_r / sum_r w_r + sum_k (sum_r c_kr part_kr) / (sum_r c_kr)

and its gradient is that of each rank, averaged by samples, where that of loss k is multiplied by

    scale_kr = c_kr R / sum_r c_kr / w_r

A sum is added up as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.functional import Pending, packed, within_reach
from lightning_parallel.techniques.tools.means import Mean, Means

OPERATIONS: dict[str, Any] = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def reduce_tensor(tensor: Tensor, group: dist.ProcessGroup, operation: object) -> Tensor:
    """A tensor reduced over a group: by mean (the default of Lightning), sum, min, max or any `ReduceOp`."""
    name = operation.lower() if isinstance(operation, str) else None
    mean = operation is None or name in ("mean", "avg")
    result = within_reach(tensor.detach().clone().contiguous(), group)
    if mean and not result.is_floating_point():
        result = result.to(torch.get_default_dtype())
    dist.all_reduce(result, op=OPERATIONS[name or "mean"] if mean or name else operation, group=group)
    return (result / group.size() if mean else result).to(tensor.device)


class Summand(NamedTuple):
    """A rank's part of a value.

    Attributes:
        value: a number.
        weight: of a mean: the samples that it counts for. None: the value is a sum.
        shares: whether the weights of all ranks add up to one.
        parts: contributions of the step's means to it.
    """

    value: Tensor
    weight: float | None
    shares: bool
    parts: Mapping[Mean, Tensor]


class BatchSums:
    """The message; it is under way when this is made. All ranks have as many values and means, of the same kinds.

    Args:
        summands: this rank's parts of the values.
        means: of the step.
        weight: of this rank, 1 on average; 0.0: it counts nowhere.
        group: the ranks.
    """

    def __init__(
        self, summands: Sequence[Summand], means: Sequence[Mean], weight: float, group: dist.ProcessGroup
    ) -> None:
        self._summands, self._means, self._weight, self._ranks = summands, means, weight, group.size()
        self._counts = [mean.count if weight else torch.zeros_like(mean.count) for mean in means]
        numbers: list[Tensor] = []
        for value, by, shares, parts in summands:
            rest = value.detach().double().reshape(())
            for mean, count in zip(means, self._counts, strict=True) if by is not None else ():
                part = parts.get(mean)
                numbers.append(torch.zeros_like(rest) if part is None else part.detach().double() * count)
                rest = rest if part is None else rest - part.detach().double()
            numbers.append(rest if by is None else rest * by)
            if not shares:
                numbers.append(torch.full_like(rest, by or 0.0))
        self._packed = packed([*numbers, *self._counts], group)
        self._work = Pending(dist.all_reduce(self._packed, group=group, async_op=True))
        self._values: list[Tensor] | None = None

    def values(self) -> list[Tensor]:
        """Wait, and return the values of the whole batch; the scales of the means are filled in, too."""
        if self._values is not None:
            return self._values
        self._work.wait()
        numbers = self._packed.unbind()
        totals, told = numbers[len(numbers) - len(self._means) :], iter(numbers)
        self._values = []
        for _, by, shares, parts in self._summands:
            whole = torch.zeros_like(self._packed[0])
            for mean, total in zip(self._means, totals, strict=True) if by is not None else ():
                share = next(told) / total  # over no targets at all it is 0 / 0, as on one device
                whole = whole + (share if mean in parts else torch.where(total == 0, 0.0, share))
            rest = next(told)
            self._values.append(whole + (rest if shares else rest / next(told)))
        for mean, count, total in zip(self._means, self._counts, totals, strict=True):
            total = total.to(count.device)
            mean.scale.factor = _scale(count, total, self._ranks, self._weight)
            mean.total.factor = torch.where(total == 0, 0.0, self._ranks / total)
        return self._values


def scale(means: Means, weight: float, group: dist.ProcessGroup, device: torch.device) -> None:
    """Fill in by what the gradients of means are multiplied. Collective; ranks may have other numbers of means.

    Args:
        means: of a step; they count as a whole where ranks have other numbers of them.
        weight: see `BatchSums`.
        group: the ranks.
        device: where numbers are.
    """
    number = len(means.all)
    least = within_reach(torch.tensor([number, -number], device=device), group)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    if least[0] == -least[1]:
        if means.all:
            BatchSums([], means.all, weight, group).values()
        return
    zero = torch.zeros((), dtype=torch.float64, device=device)
    count = means.count if weight and means.count is not None else zero
    total = within_reach(count.clone(), group)
    dist.all_reduce(total, group=group)
    factor = _scale(count, total.to(device), group.size(), weight)
    for mean in means.all:
        mean.scale.factor = factor


def _scale(own: Tensor, total: Tensor, ranks: int, weight: float) -> Tensor:
    """By what the gradient of a mean is multiplied; by zero where there is nothing to average, on this rank or any."""
    scale = own * (ranks / weight) / total if weight else torch.zeros_like(own)
    return torch.where(total == 0, 0.0, scale)
