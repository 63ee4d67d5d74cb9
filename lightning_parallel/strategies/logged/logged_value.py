"""Values that a step logged of the parts of a batch, and what they make for the whole batch.

A value v_i of part i is a sum of multiples of means and of a rest. Mean k of part i is over c_ki targets; the part has
n_i samples. For the batch that makes

    value = sum_i n_i rest_i / sum_i n_i + sum_k (sum_i c_ki part_ki) / (sum_i c_ki)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.strategies.logged.functions import taken, undone
from lightning_parallel.strategies.logged.kinds import Kind, common
from lightning_parallel.strategies.logged.reductions import HOW, NOT_SEEN, SeenKind, joined, name_of, reduced
from lightning_parallel.strategies.logged.sums import OfMean, as_one
from lightning_parallel.techniques.tools.means import Means, is_among

LOSS = -1
"""In place of the number of a mean: all by which the loss counts."""


@dataclass(frozen=True)
class LoggedValue:
    """One call of `self.log`; a metric is noted by its name in the module, also where its value was logged.

    Attributes:
        name: under which it was logged.
        value: of the metric of which name.
        options: those of the call.
        samples: how many.
        metric: the name of a metric whose value was logged.
        origin: the tensor that was logged.
        of_means: what means contribute to it, by their numbers, or to what `seen.function` was taken of.
        seen: of what kind it is.
    """

    name: str
    value: Tensor | str
    options: dict[str, Any]
    samples: float
    metric: str | None = None
    origin: Tensor | None = None
    of_means: Mapping[int, OfMean] = field(default_factory=dict)
    seen: SeenKind = NOT_SEEN

    def counting(self, means: Means | None, averaged: Sequence[Tensor]) -> LoggedValue:
        """The value, as it counts in the batch.

        Args:
            means: of the part of the batch.
            averaged: the values of these, and the loss: it counts as a whole, whatever it was made of.
        """
        of_means, count = self.of_means, None if means is None else means.count
        if (
            means is not None
            and count is not None
            and self._is_among(averaged)
            and not self._is_among([each.given for each in means.all])
        ):
            of_means = {LOSS: OfMean(torch.as_tensor(self.value), count)}
        unknown = self.seen.kind in (None, Kind.OTHER)
        return replace(self, of_means=of_means, seen=SeenKind(Kind.MEAN) if of_means and unknown else self.seen)

    def _is_among(self, values: Sequence[Tensor]) -> bool:
        return self.origin is not None and is_among(self.origin, values)


def combined(same: Sequence[LoggedValue], metrics: Mapping[str, Any], alone: bool) -> LoggedValue:
    """The value of the batch.

    Args:
        same: what was logged under one name, of each part.
        metrics: the values of metrics for the batch.
        alone: whether no other rank has samples of the batch; else what means contribute is told.
    """
    first = same[0]
    options = dict(first.options)
    if options.get("batch_size") is not None:
        options["batch_size"] = int(sum(noted.samples for noted in same))
    if first.metric is not None:
        return LoggedValue(first.name, metrics[first.metric].detach(), options, first.samples)
    values = [noted.value.cpu() for noted in same if isinstance(noted.value, Tensor)]
    if not values:
        return LoggedValue(first.name, first.value, options, first.samples)
    seen = joined([noted.seen for noted in same])
    how = HOW.get(seen.kind or Kind.OTHER, name_of(options.get("reduce_fx", "mean")))
    dtype = values[0].dtype if values[0].is_floating_point() else torch.get_default_dtype()
    values = [undone(seen.function, value) for value in values]
    samples = [noted.samples for noted in same]
    of_means = [noted.of_means if noted.seen.function == seen.function else {} for noted in same]
    if how == "mean" and all(of_means):
        value, whole = _of_means(values, samples, of_means, alone)
    else:
        value, whole = reduced(values, samples, how), {}
    if whole or seen.function:
        value = taken(seen.function, value).to(dtype)
    of_whole = {} if alone else whole
    return LoggedValue(first.name, value, options, first.samples, None, value, of_whole, _for_ranks(seen, same))


def _for_ranks(seen: SeenKind, same: Sequence[LoggedValue]) -> SeenKind:
    """What ranks are told of the kind: numbers that are only like each other are no news for others."""
    if seen.function:
        return seen
    first = same[0].seen
    kind = common((noted.seen.kind for noted in same), first.number is not None)
    return SeenKind((seen.kind or Kind.OTHER) if kind is Kind.SAME else kind, first.number, first.value)


def _of_means(
    values: Sequence[Tensor], samples: Sequence[float], of_means: Sequence[Mapping[int, OfMean]], alone: bool
) -> tuple[Tensor, dict[int, OfMean]]:
    """A value that means contribute to, of the values of all parts, and what each of the means contributes."""
    parts = _alike([{k: _in_numbers(each) for k, each in of_part.items()} for of_part in of_means])
    made = [sum(each.part for each in of_part.values()) for of_part in parts]
    rest = reduced([value.double() - part for value, part in zip(values, made, strict=True)], samples, "mean")
    whole = {k: _together([of_part[k] for of_part in parts], alone) for k in sorted(parts[0])}
    return sum((each.part for each in whole.values()), rest), whole


def _in_numbers(of_mean: OfMean) -> OfMean:
    """The same on the host, in double precision."""
    return OfMean(of_mean.part.detach().double().cpu(), float(of_mean.over))


def _alike(parts: Sequence[dict[int, OfMean]]) -> Sequence[dict[int, OfMean]]:
    """The contributions of the same means to each part; where those were others, of all as one."""
    if len({frozenset(of_means) for of_means in parts}) == 1:
        return parts
    return [{0: as_one([*of_means.values()])} for of_means in parts]


def _together(parts: Sequence[OfMean], alone: bool) -> OfMean:
    """What one mean contributes to the batch, of its contributions to the parts of it."""
    count = sum(float(each.over) for each in parts)
    total = torch.stack([each.part * each.over for each in parts]).sum()
    if alone:
        return OfMean(total / count, count)  # over nothing at all it is 0 / 0, as on one device
    return OfMean(total / count if count else total, count)
