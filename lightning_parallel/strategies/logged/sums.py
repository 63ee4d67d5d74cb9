"""Values of a whole batch from what each rank has of it, in one message of numbers that are added up.

A value v of rank r is a sum of multiples of means and of a rest: v_r = rest_r + sum_k part_kr. Of R ranks, each has
the share w_r of the samples (1 on average), and mean k of rank r counts c_kr. For the whole batch that makes

    value = sum_r w_r / R rest_r + sum_k (sum_r c_kr part_kr) / (sum_r c_kr)

and its gradient is that of each rank, times w_r, averaged, where that of mean k is multiplied by

    scale_kr = c_kr R / sum_r c_kr / w_r
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.functional import Pending, within_reach
from lightning_parallel.techniques.tools.means import Means
from lightning_parallel.values import batch_size


@dataclass(frozen=True)
class Summed:
    """A rank's part of a value.

    Attributes:
        value: a number.
        weight: of what no mean contributes to it.
        parts: what means contribute, by their numbers.
    """

    value: Tensor
    weight: float
    parts: Mapping[int, Tensor]


class BatchSums:
    """The message; it is under way when this is made.

    Args:
        summed: the values, as many on every rank.
        means: as many on every rank.
        share: of this rank; 0.0: it counts nowhere.
        group: the ranks.
    """

    def __init__(self, summed: Sequence[Summed], means: Means, share: float, group: dist.ProcessGroup) -> None:
        self._summed, self._means, self._share, self._ranks = summed, means, share, group.size()
        self._counts = [_count(means, number, share) for number in range(len(means.all))]
        numbers = [number.reshape(()) for value in summed for number in self._numbers_of(value)]
        self._packed = torch.stack([within_reach(number.double(), group) for number in [*numbers, *self._counts]])
        self._work = Pending(dist.all_reduce(self._packed, group=group, async_op=True))
        self._values: list[Tensor] | None = None

    def _numbers_of(self, summed: Summed) -> list[Tensor]:
        value, zero = summed.value.detach().double(), torch.zeros((), dtype=torch.float64, device=summed.value.device)
        parts = {number: part.detach().double() for number, part in summed.parts.items()}
        rest = value - sum(parts.values()) if parts else value
        return [rest * summed.weight, *(parts.get(k, zero) * count for k, count in enumerate(self._counts))]

    def values(self) -> list[Tensor]:
        """The values of the whole batch; the scales of the means are filled in, too."""
        if self._values is None:
            self._work.wait()
            counts = len(self._counts)
            numbers = list(self._packed.unbind())
            totals = numbers[len(numbers) - counts :]
            rows = [numbers[start : start + counts + 1] for start in range(0, len(numbers) - counts, counts + 1)]
            self._values = [_whole(row, totals, summed) for row, summed in zip(rows, self._summed, strict=True)]
            for mean, count, total in zip(self._means.all, self._counts, totals, strict=True):
                total = total.to(count.device)
                mean.scale.factor = _scale(count, total, self._ranks, self._share)
                mean.sum.factor = torch.where(total == 0, 0.0, self._ranks / total)
        return self._values


def scale_together(means: Means, share: float, group: dist.ProcessGroup, device: torch.device) -> None:
    """Fills in one scale for all means of a step, of which ranks may have different numbers; all of them call it.

    Args:
        means: count as a whole.
        share: see `BatchSums`.
        group: the ranks.
        device: where numbers are.
    """
    zero = torch.zeros((), dtype=torch.float64, device=device)
    count = means.count if share and means.count is not None else zero
    total = within_reach(count.clone(), group)
    dist.all_reduce(total, group=group)
    scale = _scale(count, total.to(device), group.size(), share)
    for mean in means.all:
        mean.scale.factor = scale


def _scale(count: Tensor, total: Tensor, ranks: int, share: float) -> Tensor:
    """By what the gradient of a mean is multiplied; by zero where there is nothing to average, on this rank or any."""
    scale = count * (ranks / share) / total if share else torch.zeros_like(count)
    return torch.where(total == 0, 0.0, scale)


def _whole(row: Sequence[Tensor], totals: Sequence[Tensor], summed: Summed) -> Tensor:
    whole, *parts = row
    for number, (part, total) in enumerate(zip(parts, totals, strict=True)):
        mean = part / total  # over nothing at all it is 0 / 0, as on one device
        whole = whole + (mean if number in summed.parts else torch.where(total == 0, 0.0, mean))
    return whole


def _count(means: Means, number: int, share: float) -> Tensor:
    count = means.all[number].count
    if share == 0.0:
        return torch.zeros_like(count)
    return torch.full_like(count, share) if number in single_samples(means) else count


def single_samples(means: Means) -> frozenset[int]:
    """The means that count by samples, as each is over one."""
    return means.of_single_samples(batch_size(means.batch)) if len(means.all) > 1 else frozenset()
