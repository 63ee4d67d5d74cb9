"""Values of a whole batch from what each rank has of it, in one message of numbers that are added up.

A value v of rank r is a sum of multiples of means and of a rest: v_r = rest_r + sum_k part_kr. Of R ranks, each has
the share w_r of the samples (1 on average), and mean k of rank r is over c_kr targets. For the whole batch that makes

    value = sum_r w_r / R rest_r + sum_k (sum_r c_kr part_kr) / (sum_r c_kr)

and its gradient is that of each rank, times w_r, averaged, where that of mean k is multiplied by

    scale_kr = c_kr R / sum_r c_kr / w_r

A value that a rank has put together of parts of its batch comes with means of its own, which no other value is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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


class OfMean(NamedTuple):
    """What a mean contributes to a value, and over how much it is."""

    part: Tensor
    over: Tensor | float


NOTHING = OfMean(torch.zeros((), dtype=torch.float64), 0.0)
"""Where no mean contributes."""


def as_one(means: Sequence[OfMean]) -> OfMean:
    """What several means contribute, as if they were one over all that they count."""
    return OfMean(sum((each.part for each in means[1:]), means[0].part), sum(each.over for each in means))


def as_many(means: Sequence[OfMean], number: int) -> Sequence[OfMean]:
    """What means contribute, where they are to count as so many."""
    if len(means) == number or not number:
        return means[:number]
    return [as_one(means) if means else NOTHING, *[NOTHING] * (number - 1)]


@dataclass(frozen=True)
class Summed:
    """A rank's part of a value.

    Attributes:
        value: a number.
        weight: of what no mean contributes to it.
        parts: what means contribute.
        own: what means contribute that no other value is made of: as many on all ranks, some of them `NOTHING`.
    """

    value: Tensor
    weight: float
    parts: Mapping[Mean, Tensor]
    own: Sequence[OfMean] = ()


class BatchSums:
    """The message; it is under way when this is made.

    Args:
        summed: the values, as many on every rank.
        means: as many on every rank.
        share: of this rank; 0.0: it counts nowhere.
        group: the ranks.
    """

    def __init__(self, summed: Sequence[Summed], means: Sequence[Mean], share: float, group: dist.ProcessGroup) -> None:
        self._summed, self._means, self._share, self._ranks = summed, means, share, group.size()
        self._counts = [mean.count * float(share != 0.0) for mean in means]
        numbers = [number.reshape(()) for value in summed for number in self._numbers_of(value)]
        numbers += self._counts
        self._packed = packed([number.double() for number in numbers], group)
        self._work = Pending(dist.all_reduce(self._packed, group=group, async_op=True))
        self._values: list[Tensor] | None = None

    def _numbers_of(self, summed: Summed) -> list[Tensor]:
        value, zero = summed.value.detach().double(), torch.zeros((), dtype=torch.float64, device=summed.value.device)
        known = self._means  # none where ranks computed other numbers of means: all is rest then
        parts = {mean: part.detach().double() for mean, part in summed.parts.items() if mean in known}
        rest = value - sum(parts.values()) if parts else value
        numbers = [parts.get(mean, zero) * count for mean, count in zip(known, self._counts, strict=True)]
        counts = float(self._share != 0.0)
        for part, count in summed.own:
            rest = rest - part
            numbers += [zero + part * (count * counts), zero + count * counts]
        return [rest * summed.weight, *numbers]

    def values(self) -> list[Tensor]:
        """The values of the whole batch; the scales of the means are filled in, too."""
        if self._values is None:
            self._work.wait()
            numbers = self._packed.unbind()
            totals = numbers[len(numbers) - len(self._counts) :]
            told, by_mean = iter(numbers), dict(zip(self._means, totals, strict=True))
            self._values = [_whole(told, by_mean, summed) for summed in self._summed]
            for mean, count, total in zip(self._means, self._counts, totals, strict=True):
                total = total.to(count.device)
                mean.scale.factor = _scale(count, total, self._ranks, self._share)
                mean.total.factor = torch.where(total == 0, 0.0, self._ranks / total)
        return self._values


def scale(means: Means, share: float, group: dist.ProcessGroup, device: torch.device) -> None:
    """Fills in by what the gradients of means are multiplied; all ranks call it, which may have other numbers of them.

    Args:
        means: of a step; they count as a whole where ranks have other numbers of them.
        share: see `BatchSums`.
        group: the ranks.
        device: where numbers are.
    """
    number = len(means.all)
    least = within_reach(torch.tensor([number, -number], device=device), group)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    if least[0] != -least[1]:
        _scale_together(means, share, group, device)
    elif means.all:
        BatchSums([], means.all, share, group).values()


def _scale_together(means: Means, share: float, group: dist.ProcessGroup, device: torch.device) -> None:
    zero = torch.zeros((), dtype=torch.float64, device=device)
    count = means.count if share and means.count is not None else zero
    total = within_reach(count.clone(), group)
    dist.all_reduce(total, group=group)
    factor = _scale(count, total.to(device), group.size(), share)
    for mean in means.all:
        mean.scale.factor = factor


def _scale(own: Tensor, total: Tensor, ranks: int, share: float) -> Tensor:
    """By what the gradient of a mean is multiplied; by zero where there is nothing to average, on this rank or any."""
    scale = own * (ranks / share) / total if share else torch.zeros_like(own)
    return torch.where(total == 0, 0.0, scale)


def _whole(numbers: Iterator[Tensor], totals: Mapping[Mean, Tensor], summed: Summed) -> Tensor:
    whole = next(numbers)
    for mean, total in totals.items():
        whole = whole + _mean(next(numbers), total, mean in summed.parts)
    for own in summed.own:
        part, count = next(numbers), next(numbers)
        whole = whole + _mean(part, count, own is not NOTHING)
    return whole


def _mean(part: Tensor, total: Tensor, contributes: bool) -> Tensor:
    mean = part / total  # over nothing at all it is 0 / 0, as on one device
    return mean if contributes else torch.where(total == 0, 0.0, mean)
