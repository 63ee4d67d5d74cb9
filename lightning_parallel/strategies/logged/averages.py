"""Averages of what the user gives a metric for a whole batch, where no rank or run has the whole batch.

A `MeanMetric` that is given a loss counts each of its values once. One device gives it one value for a batch; here it
gets one for each part, which must count in it by the part's share of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric, SumMetric


def averages(metric: Metric) -> bool:
    """Whether a metric may be given one value for a whole batch."""
    return isinstance(metric, MeanMetric | SumMetric)


def _of_batch(value: Any, weight: tuple[Any, ...], named: dict[str, Any]) -> bool:
    return not weight and not named and torch.as_tensor(value).dim() == 0


class Shared:
    """Until `close`, a value for the whole batch counts in an average by this rank's share of it.

    Args:
        metric: the average.
        share: this rank's samples against those of the others on average.
    """

    def __init__(self, metric: MeanMetric, share: float) -> None:
        self._metric, self._share = metric, share
        self._update = metric.__dict__["update"]
        metric.__dict__["update"] = self.update

    def update(self, value: Any, *weight: Any, **named: Any) -> None:
        """The metric's own update."""
        if _of_batch(value, weight, named):
            named = {"weight": self._share}
        self._update(value, *weight, **named)

    def close(self) -> None:
        """Gives the metric its own update back."""
        self._metric.__dict__["update"] = self._update


class WeightedUpdates:
    """Until `close`, remembers what a metric is given for a part of a batch, so that it can count by its share later.

    Args:
        metric: a mean or a sum.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._added: list[tuple[Any, dict[str, Tensor]]] = []
        self._update = metric.__dict__["update"]
        metric.__dict__["update"] = self.update

    def update(self, value: Any, *weight: Any, **named: Any) -> None:
        """The metric's own update."""
        before = {name: getattr(self._metric, name).clone() for name in self._metric._defaults}
        self._update(value, *weight, **named)
        if _of_batch(value, weight, named):
            self._added.append((value, {name: getattr(self._metric, name) - held for name, held in before.items()}))

    @property
    def values(self) -> list[Any]:
        """What it was given for the batch as a whole."""
        return [value for value, _ in self._added]

    def count_by(self, samples: float, share: float, is_mean: Callable[[Tensor], bool]) -> None:
        """Lets the values count by their share of the batch; a sum only of those that are means over samples.

        Args:
            samples: the part's share of the samples.
            share: its share in means.
            is_mean: tells means from other values.
        """
        for value, added in self._added:
            if isinstance(value, Tensor) and is_mean(value):
                self._scale(added, share)
            elif isinstance(self._metric, MeanMetric):
                self._scale(added, samples)

    def _scale(self, added: dict[str, Tensor], share: float) -> None:
        for name, value in added.items():
            setattr(self._metric, name, getattr(self._metric, name) + value * (share - 1))

    def close(self) -> None:
        """Gives the metric its own update back."""
        self._metric.__dict__["update"] = self._update
