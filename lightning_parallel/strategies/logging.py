"""`self.log` and torchmetrics give on every rank the values of one device, without `sync_dist`.

Epoch values are reduced when Lightning computes them. Step values are reduced together, in one message per step that
travels while backward runs. Everything here that touches Lightning's private results is in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor
from torchmetrics import Metric

from lightning_parallel.collectives.functional import Pending

OPERATIONS: dict[str, Any] = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}

NOTHING = {"mean": None, "avg": None, "sum": 0.0, "min": float("inf"), "max": float("-inf")}
"""What a batch that does not count contributes to a reduction; to a mean it contributes with weight zero."""


def reduce_tensor(tensor: Tensor, group: dist.ProcessGroup, operation: object) -> Tensor:
    """A tensor reduced over a group: by mean (the default of Lightning), sum, min, max or any `ReduceOp`."""
    name = operation.lower() if isinstance(operation, str) else None
    mean = operation is None or name in ("mean", "avg")
    result = tensor.detach().clone().contiguous()
    if mean and not result.is_floating_point():
        result = result.to(torch.get_default_dtype())
    dist.all_reduce(result, op=OPERATIONS[name or "mean"] if mean or name else operation, group=group)
    return result / group.size() if mean else result


class StepLog:
    """What one rank logs, so that all ranks that read different samples see the values of the whole batch.

    Args:
        module: the user's module; its `log` is led through here until `close`.
        group: the ranks that read different samples.
    """

    def __init__(self, module: LightningModule, group: dist.ProcessGroup) -> None:
        self._module = module
        self._group = group
        self._share = 1.0
        self._inside_log = False
        self._logged = False
        self._pending: list[Callable[[], None]] = []
        self._log = module.log
        self._metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
        self._own_groups = [(metric, metric.process_group, metric.dist_sync_on_step) for metric in self._metrics]
        module.__dict__["log"] = self.log
        for metric in self._metrics:
            metric.process_group = None if group.size() == dist.get_world_size() else group
            metric.dist_sync_on_step = True  # until `log` says that nobody asks for its step values

    def close(self) -> None:
        """Gives the module its own `log` and the metrics their own groups back."""
        self._module.__dict__.pop("log", None)
        for metric, group, on_step in self._own_groups:
            metric.process_group, metric.dist_sync_on_step = group, on_step

    # ---------------------------------------------------------------- what the user calls

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """`LightningModule.log` with `sync_dist=True`, except that step values wait for `reduce_step`."""
        named = dict(zip(("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"), args, strict=False)) | kwargs
        rest = dict(zip(("enable_graph", "sync_dist"), args[5:], strict=False)) if len(args) > 5 else {}
        options = {**named, **rest, "sync_dist": True}
        if self._share == 0.0:
            value, options = _without_effect(value, options)
        self._logged = self._inside_log = True
        try:
            self._log(name, value, **options)
        finally:
            self._inside_log = False
        if isinstance(value, Metric):
            value.dist_sync_on_step = self._asked_on_step(value)

    @property
    def defers(self) -> bool:
        """Whether a reduction asked for now is that of a step value, which `reduce_step` will do with all others."""
        return self._inside_log

    def _asked_on_step(self, metric: Metric) -> bool:
        results = self._module.trainer._results
        return any(result.meta.on_step for result in (results or {}).values() if result.value is metric)

    # ---------------------------------------------------------------- what the strategy calls

    @contextmanager
    def counting(self, share: float) -> Iterator[None]:
        """Inside, what is logged counts `share` times as much as the other ranks' on average; 0.0: not at all."""
        self._share = share
        restore = [_stop_updates(metric) for metric in self._metrics] if share == 0.0 else []
        try:
            yield
        finally:
            self._share = 1.0
            for undo in restore:
                undo()

    def reduce_step(self, share: float) -> None:
        """Starts to reduce the step values that the user's step logged; `settle` puts them in place."""
        if not self._logged:
            return
        self._logged = False
        results = [result for result in (self._module.trainer._results or {}).values() if _has_step_value(result)]
        if not results:
            return
        pending = [self._start(results, kind, share) for kind in ("sum", "min", "max")]
        self._pending = pending

    def settle(self) -> None:
        """Waits for the step values under way and shows them to callbacks and loggers."""
        if self._pending:
            for finish in self._pending:
                finish()
            self._pending = []

    def _start(self, results: list[_ResultMetric], kind: str, share: float) -> Callable[[], None]:
        chosen = [result for result in results if _kind(result) == kind]
        if not chosen:
            return lambda: None
        weights = [share / self._group.size() if result.meta.is_mean_reduction else 1.0 for result in chosen]
        values = [_step_value(result).double() * weight for result, weight in zip(chosen, weights, strict=True)]
        packed = torch.stack(values)
        work = Pending(dist.all_reduce(packed, op=OPERATIONS[kind], group=self._group, async_op=True))

        def finish() -> None:
            work.wait()
            for result, value in zip(chosen, packed.unbind(), strict=True):
                result._forward_cache = value.to(_step_value(result).dtype)
                if not result.meta.on_epoch:
                    result.value = result._forward_cache

        return finish


def _has_step_value(result: _ResultMetric) -> bool:
    meta = result.meta
    in_use = meta.on_step and not result.has_reset and not meta.sync.rank_zero_only
    return in_use and result.is_tensor and result._forward_cache is not None


def _step_value(result: _ResultMetric) -> Tensor:
    value = result._forward_cache
    assert isinstance(value, Tensor)
    return value.detach().reshape(())


def _kind(result: _ResultMetric) -> str:
    if result.meta.is_min_reduction:
        return "min"
    return "max" if result.meta.is_max_reduction else "sum"


def _without_effect(value: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A value that leaves the reduction as it is; the key is logged all the same, as on every other rank."""
    reduction = options.get("reduce_fx", "mean")
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "mean")
    neutral = NOTHING.get(name.lower())
    if isinstance(value, Metric):
        return value, options
    if neutral is None:
        return value, {**options, "batch_size": 0}
    return torch.full_like(torch.as_tensor(value, dtype=torch.get_default_dtype()), neutral), options


def _stop_updates(metric: Metric) -> Callable[[], None]:
    update = metric.__dict__["update"]
    metric.__dict__["update"] = lambda *_, **__: None

    def undo() -> None:
        metric.__dict__["update"] = update

    return undo
