"""What torchmetrics objects need so that their values are those of one device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor
from torchmetrics import Metric


class Uncounted:
    """Until `close`, updates leave a metric as it is: it is given samples that another rank counts.

    Updates run all the same. A metric that keeps what it saw then holds empty tensors of the right kind, without which
    ranks could not put together what they hold.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._update = metric.__dict__["update"]
        metric.__dict__["update"] = self.update

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Runs the metric's own update and takes back what it did."""
        before = {name: _copied(getattr(self._metric, name)) for name in self._metric._defaults}
        self._update(*args, **kwargs)
        for name, state in before.items():
            setattr(self._metric, name, _emptied(state, getattr(self._metric, name)))

    def close(self) -> None:
        """Gives the metric its own update back."""
        self._metric.__dict__["update"] = self._update


def _copied(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state)


def _emptied(before: Any, after: Any) -> Any:
    if isinstance(before, Tensor):
        return before
    return before + [added[:0] if added.dim() else added.new_empty(0) for added in after[len(before) :]]


def at_most_on_step(metric: Metric, results: Iterable[_ResultMetric]) -> None:
    """A metric whose values in single steps nobody logs need not gather them."""
    metric.dist_sync_on_step = any(result.meta.on_step for result in results if result.value is metric)
