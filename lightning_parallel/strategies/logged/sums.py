"""Values of a whole batch from those of its parts, which ranks or microbatches have, by numbers that are added up.

A mean v of part r is a sum of multiples of losses that count by their targets (`Mean`), and of a rest that counts by
samples: v_r = rest_r + sum_k part_kr. Part r has w_r samples, and loss k of it is over c_kr targets. Over all R parts

    value = sum_r w_r rest_r / sum_r w_r + sum_k (sum_r c_kr part_kr) / (sum_r c_kr)

and its gradient is that of each part, averaged by samples, where that of loss k is multiplied by

    scale_kr = c_kr R / sum_r c_kr / w_r

A sum is added up as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.functional import Pending, packed, within_reach
from lightning_parallel.techniques.tools.means import Mean, Means

K = TypeVar("K", bound=Hashable)

SIGNS = {"max": 1.0, "min": -1.0}
"""A minimum is sent as the maximum of negative values."""


def reduce_tensor(tensor: Tensor, group: dist.ProcessGroup, operation: object) -> Tensor:
    """A tensor reduced over a group: by mean (the default of Lightning), sum, min, max or any `ReduceOp`."""
    name = operation.lower() if isinstance(operation, str) else None
    mean = operation is None or name in ("mean", "avg")
    result = within_reach(tensor.detach().clone().contiguous(), group)
    if mean and not result.is_floating_point():
        result = result.to(torch.get_default_dtype())
    by_name: dict[Any, Any] = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
    dist.all_reduce(result, op=dist.ReduceOp.SUM if mean else by_name[name] if name else operation, group=group)
    return (result / group.size() if mean else result).to(tensor.device)


class Term(NamedTuple):
    """What a rank or a microbatch contributes to a value.

    Attributes:
        how: the reduction: mean, sum, min or max.
        value: a number.
        weight: of a mean: the samples that it counts for.
        shares: whether the weights of all terms add up to one.
        parts: contributions of the step's means to it.
    """

    how: str
    value: Tensor
    weight: float = 1.0
    shares: bool = False
    parts: Mapping[Any, Tensor] = {}


def to_sums(terms: Sequence[Term], counts: Mapping[K, Tensor]) -> list[Tensor]:
    """The numbers that are added up over terms of the same values.

    Args:
        terms: means and sums.
        counts: over how many targets each mean is.
    """
    numbers: list[Tensor] = []
    for how, value, weight, shares, parts in terms:
        rest = value.detach().double().reshape(())
        if how == "sum":
            numbers.append(rest)
            continue
        for mean, count in counts.items():
            part = parts[mean].detach().double() if mean in parts else torch.zeros_like(rest)
            numbers.append(part * count)
            rest = rest - part
        numbers += [rest * weight] if shares else [rest * weight, torch.full_like(rest, weight)]
    return [*numbers, *counts.values()]


def from_sums(
    numbers: Sequence[Tensor], terms: Sequence[Term], means: Sequence[K], alone: bool = True
) -> Iterator[tuple[Tensor, dict[K, Tensor]]]:
    """The value of the whole batch of each term, and the contributions of means to it.

    Args:
        numbers: of `to_sums`, added up.
        terms: the same as there.
        means: likewise.
        alone: whether a mean over no targets at all is nan, as on one device; else it is 0.
    """
    totals, left = numbers[len(numbers) - len(means) :], iter(numbers)
    for how, _, _, shares, parts in terms:
        if how == "sum":
            yield next(left), {}
            continue
        whole: dict[K, Tensor] = {}
        for mean, total in zip(means, totals, strict=True):
            part = next(left) / total
            whole[mean] = part if alone and mean in parts else torch.where(total == 0, 0.0, part)
        rest = next(left) if shares else next(left) / next(left)
        yield sum(whole.values(), start=rest), whole


class StepReduction:
    """Reduces values over ranks. The messages, one of sums and one of extremes, are under way when this is made.

    All ranks have as many values and means, of the same kinds.

    Args:
        terms: this rank's parts of the values.
        means: of the step.
        weight: of this rank, 1 on average; 0.0: it counts nowhere.
        group: the ranks.
    """

    def __init__(self, terms: Sequence[Term], means: Sequence[Mean], weight: float, group: dist.ProcessGroup) -> None:
        self._terms, self._weight, self._ranks = terms, weight, group.size()
        self._counts = {mean: mean.count if weight else torch.zeros_like(mean.count) for mean in means}
        self._added = [term for term in terms if term.how not in SIGNS]
        self._sums = _send(to_sums(self._added, self._counts), dist.ReduceOp.SUM, group)
        extremes = [SIGNS[each.how] * each.value.detach().double().reshape(()) for each in terms if each.how in SIGNS]
        self._maxima = _send(extremes, dist.ReduceOp.MAX, group)
        self._values: list[Tensor] | None = None

    def values(self) -> list[Tensor]:
        """Wait, and return the values of the whole batch; the scales of the means are filled in, too."""
        if self._values is None:
            sums, maxima = self._sums(), iter(self._maxima())
            added = from_sums(sums, self._added, [*self._counts])
            self._values = [
                SIGNS[term.how] * next(maxima) if term.how in SIGNS else next(added)[0] for term in self._terms
            ]
            totals = sums[len(sums) - len(self._counts) :]
            for (mean, count), total in zip(self._counts.items(), totals, strict=True):
                total = total.to(count.device)
                mean.scale.factor = _scale(count, total, self._ranks, self._weight)
                mean.total.factor = torch.where(total == 0, 0.0, self._ranks / total)
        return self._values


def _send(numbers: Sequence[Tensor], operation: Any, group: dist.ProcessGroup) -> Callable[[], Sequence[Tensor]]:
    """Start to reduce numbers, if there are any; return what waits for them."""
    if not numbers:
        return list
    sent = packed(numbers, group)
    work = Pending(dist.all_reduce(sent, operation, group=group, async_op=True))

    def received() -> Sequence[Tensor]:
        work.wait()
        return sent.unbind()

    return received


def scale(means: Means, weight: float, group: dist.ProcessGroup, device: torch.device) -> None:
    """Fill in by what the gradients of means are multiplied. Collective; ranks may have other numbers of means.

    Args:
        means: of a step; they count as a whole where ranks have other numbers of them.
        weight: see `StepReduction`.
        group: the ranks.
        device: where numbers are.
    """
    number = len(means.all)
    least = within_reach(torch.tensor([number, -number], device=device), group)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    if least[0] == -least[1]:
        StepReduction([], means.all, weight, group).values()
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
