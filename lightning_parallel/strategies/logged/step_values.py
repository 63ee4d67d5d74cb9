"""Values that steps log: Lightning's private result of each name, and this rank's part of the value of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_parallel.strategies.lightning_package import LightningModule, _ResultMetric
from lightning_parallel.strategies.logged.sums import Term
from lightning_parallel.techniques.tools.means import Mean

NEUTRAL = {"sum": 0.0, "min": float("inf"), "max": float("-inf")}
"""What a batch that does not count contributes to a reduction; to a mean it contributes with weight zero."""

OPTIONS = (*signature(LightningModule.log).parameters,)[3:]
"""The options of `self.log` after the name and the value."""


@dataclass(frozen=True)
class StepValue:
    """A value that a step logged under one name.

    Attributes:
        result: Lightning's.
        value: as it was then: a step may change it in place later, and memory of ZeRO 3 goes when the step ends.
        batch_size: the user's own; None for the samples of the batch.
        samples: by so many Lightning has counted the value in the mean of the epoch.
        parts: contributions of the step's means to it.
    """

    result: _ResultMetric
    value: Any
    batch_size: float | None
    samples: float
    parts: Mapping[Mean, Tensor]

    @property
    def how(self) -> str:
        """The reduction: mean, sum, min or max."""
        meta = self.result.meta
        if meta.is_mean_reduction:
            return "mean"
        return "sum" if meta.is_sum_reduction else "min" if meta.is_min_reduction else "max"

    @property
    def kind(self) -> str:
        """How the value is sent, as "mean by batch_size, on_step": ranks must send all values in one way."""
        meta, weighs = self.result.meta, "" if self.batch_size is None else " by batch_size"
        return f"{self.how}{weighs}{', on_step' if meta.on_step else ''}{', on_epoch' if meta.on_epoch else ''}"

    @property
    def is_shown(self) -> bool:
        """Whether loggers see the value of each step."""
        return bool(self.result.meta.on_step and self.result._forward_cache is not None)

    def changes_epoch(self, means: Sequence[Mean]) -> bool:
        """Whether means over targets count in the epoch's value, so that ranks reduce it now."""
        return self.how == "mean" and bool(means) and bool(self.result.meta.on_epoch)

    def term(self, weight: float, ranks: int) -> Term:
        """This rank's part of the value.

        Args:
            weight: of this rank's samples, 1 on average.
            ranks: how many there are.
        """
        # a number of Python's has more digits than the dtype that it would get here
        value = torch.as_tensor(self.value, dtype=torch.float64 if isinstance(self.value, float) else None)
        if self.how != "mean":
            return Term(self.how, value if weight else torch.full_like(value, NEUTRAL[self.how], dtype=torch.float64))
        if self.batch_size is None:
            return Term("mean", value, weight / ranks, True, self.parts)
        return Term("mean", value, self.batch_size if weight else 0.0, False, self.parts)

    def place(self, value: Tensor, means: Sequence[Mean]) -> None:
        """Put the value of the whole batch in the place of this rank's."""
        result = self.result
        if self.is_shown:
            assert result._forward_cache is not None
            result._forward_cache = value.to(result._forward_cache)
            if not result.meta.on_epoch:
                result.value = result._forward_cache
        if self.changes_epoch(means) and self.samples:
            assert isinstance(result.value, Tensor)
            own = torch.as_tensor(self.value).to(result.value).reshape(())
            result.value = result.value + (value.to(own) - own) * self.samples


def name_of(reduction: Any) -> str:
    """The name of a `reduce_fx`."""
    return (reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "mean")).lower()


def options_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `self.log(name, value, ...)` by their names."""
    return {**dict(zip(OPTIONS, args, strict=False)), **kwargs}


def without_effect(value: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A value that leaves the reduction as it is; the key is logged all the same, as on every other rank."""
    if isinstance(value, Metric):
        return value, options
    neutral, value = NEUTRAL.get(name_of(options.get("reduce_fx", "mean"))), torch.as_tensor(value)
    value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
    if neutral is None:
        return torch.zeros_like(value), {**options, "batch_size": 0}
    return torch.full_like(value, neutral), options
