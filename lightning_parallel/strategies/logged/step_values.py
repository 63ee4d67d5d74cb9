"""Values of steps: Lightning's private result for each name, and what ranks make of it together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_parallel.strategies.lightning_package import LightningModule, _ResultMetric
from lightning_parallel.strategies.logged.functions import taken, undone
from lightning_parallel.strategies.logged.reductions import SeenKind, name_of
from lightning_parallel.strategies.logged.sums import OfMean, Summed, as_many
from lightning_parallel.techniques.tools.means import Mean

NOTHING = {"mean": None, "avg": None, "sum": 0.0, "min": float("inf"), "max": float("-inf")}
"""What a batch that does not count contributes to a reduction; to a mean it contributes with weight zero."""

ORDER = (*signature(LightningModule.log).parameters,)[3:]
"""The options of `self.log` after the name and the value."""


@dataclass(frozen=True)
class StepValue:
    """A value that a step logged under one name.

    Attributes:
        result: Lightning's.
        value: as it was then: a step may change it in place later, and memory of ZeRO 3 goes when the step ends.
        origin: as it was given.
        parts: what means contribute to it, or to what `function` was taken of.
        before: the epoch's value and samples before it; None at their beginning.
        seen: of what kind it is.
        how: how ranks put it together.
        own: what means of its own contribute to it, where the step ran on parts of the batch.
        function: taken of what ranks put together, see `functions`; empty for none.
    """

    result: _ResultMetric
    value: Any
    origin: Any
    parts: dict[Mean, Tensor]
    before: tuple[Any, Any] | None
    seen: SeenKind
    how: str = ""
    own: Sequence[OfMean] = ()
    function: str = ""

    def by(self, how: str | None, own: int, function: str) -> StepValue:
        """This value, to be put together so, or as `reduce_fx` says, and its own means to count as so many.

        What means contribute counts where they contribute to what all ranks put together.
        """
        parts, means = (self.parts, self.own) if function == self.seen.function else ({}, ())
        how = how or reduction_of(self.result)
        return replace(self, how=how, own=as_many(means, own), parts=parts, function=function)

    def moves(self, means: Sequence[Mean]) -> bool:
        """Whether other ranks need it now: for the value of the step, or that of the whole batch for the epoch's."""
        return self.result.is_tensor and (has_step_value(self.result) or self._is_redone(means))

    def _is_redone(self, means: Sequence[Mean]) -> bool:
        of_means = self.how == "mean" and bool(means or self.own or self.function)
        return bool(self.result.meta.on_epoch) and (of_means or self.how != reduction_of(self.result))

    def summed(self, share: float, ranks: int) -> Summed:
        """This rank's part of the value."""
        # a number of Python's has more digits than the dtype that it would get here
        value = torch.as_tensor(self.value, dtype=torch.float64 if isinstance(self.value, float) else None)
        value = undone(self.function, value)
        if self.how == "sum":
            return Summed(value, float(share != 0.0), {})
        return Summed(value, share / ranks, self.parts, self.own)

    def extreme(self, share: float) -> Tensor:
        """Its value, or one that leaves the others as they are."""
        value = torch.as_tensor(self.value).detach().double().reshape(())
        return value if share else torch.full_like(value, NOTHING[self.how] or 0.0)

    def place(self, value: Tensor, means: Sequence[Mean], ranks: int) -> None:
        """Puts the value of the whole batch in the place of this rank's."""
        result, reduction, value = self.result, reduction_of(self.result), taken(self.function, value)
        if has_step_value(result):
            show(result, value)
        if not self._is_redone(means):
            return
        assert isinstance(result.value, Tensor)
        value = value.to(result.value)
        before, samples = self.before or (torch.as_tensor(result._defaults["value"]).to(value), 0)
        if reduction == "mean":
            result.value = before + value * (result.cumulated_batch_size - samples)
        else:
            result.value = before + value / ranks if reduction == "sum" else result.meta.reduce_fx(before, value)


def has_step_value(result: _ResultMetric) -> bool:
    """Whether loggers see the value of each step."""
    return bool(result.meta.on_step and result.is_tensor and result._forward_cache is not None)


def count_as_exactly(result: _ResultMetric) -> None:
    """Lets the samples of a mean in float64 count in it, too: ranks divide by the mean of their counts.

    That of integers has the default dtype, which has too few digits where samples do not divide evenly among ranks.
    """
    if result.meta.is_mean_reduction and isinstance(result.value, Tensor) and result.value.dtype == torch.float64:
        result.cumulated_batch_size = result.cumulated_batch_size.double()


def step_value(result: _ResultMetric) -> Tensor:
    """The value of this step."""
    assert result._forward_cache is not None
    value: Tensor = result._forward_cache.detach().reshape(())
    return value


def show(result: _ResultMetric, value: Tensor) -> None:
    """Puts the value of the whole batch in its place."""
    result._forward_cache = value.to(step_value(result))
    if not result.meta.on_epoch:
        result.value = result._forward_cache


def reduction_of(result: _ResultMetric) -> str:
    """The name of the reduction that makes an epoch's value of those of its batches."""
    meta = result.meta
    named = {"min": meta.is_min_reduction, "max": meta.is_max_reduction, "sum": meta.is_sum_reduction}
    return next((name for name, is_it in named.items() if is_it), "mean")


def options_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `self.log(name, value, ...)` by their names."""
    return {**dict(zip(ORDER, args, strict=False)), **kwargs}


def log_nothing(*_: Any, **__: Any) -> None:
    """What a copy of a module logs."""


def without_effect(value: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A value that leaves the reduction as it is; the key is logged all the same, as on every other rank."""
    neutral = NOTHING.get(name_of(options.get("reduce_fx", "mean")))
    if isinstance(value, Metric):
        return value, options
    if neutral is None:
        return value, {**options, "batch_size": 0}
    return torch.full_like(torch.as_tensor(value, dtype=torch.get_default_dtype()), neutral), options
