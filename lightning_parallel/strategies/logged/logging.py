"""`self.log` and torchmetrics give on every rank the values of one device, without `sync_dist`.

Epoch values are reduced when Lightning computes them. Step values are reduced together, in one message per step that
travels while backward runs; with it ranks find out whether they logged the same names, as a reduction of what only some
ranks log would never end. Everything here that touches Lightning's private results is in this file.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric, Metric

from lightning_parallel.collectives.functional import Pending, within_reach
from lightning_parallel.strategies.logged.averages import Shared
from lightning_parallel.strategies.logged.kinds import Kinds
from lightning_parallel.strategies.logged.metrics import Uncounted, at_most_on_step
from lightning_parallel.strategies.ranks.agreement import LOGGED, Comparison, Content
from lightning_parallel.strategies.ranks.signals import Requested

log = logging.getLogger(__name__)

OPERATIONS: dict[str, Any] = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}

NOTHING = {"mean": None, "avg": None, "sum": 0.0, "min": float("inf"), "max": float("-inf")}
"""What a batch that does not count contributes to a reduction; to a mean it contributes with weight zero."""

ROOM = 32
"""Messages are so many values long or a multiple: gloo breaks down over sizes that differ, before ranks can say why."""


def reduce_tensor(tensor: Tensor, group: dist.ProcessGroup, operation: object) -> Tensor:
    """A tensor reduced over a group: by mean (the default of Lightning), sum, min, max or any `ReduceOp`."""
    name = operation.lower() if isinstance(operation, str) else None
    mean = operation is None or name in ("mean", "avg")
    result = within_reach(tensor.detach().clone().contiguous(), group)
    if mean and not result.is_floating_point():
        result = result.to(torch.get_default_dtype())
    dist.all_reduce(result, op=OPERATIONS[name or "mean"] if mean or name else operation, group=group)
    return (result / group.size() if mean else result).to(tensor.device)


class StepLog:
    """What one rank logs, so that all ranks that read different samples see the values of the whole batch.

    Args:
        module: the user's module; its `log` is led through here until `close`.
        group: the ranks that read different samples.
        host: all ranks, for messages of the host.
        weight: how much the batch at hand counts against the other ranks' on average; 0.0: not at all.
    """

    def __init__(
        self, module: LightningModule, group: dist.ProcessGroup, host: dist.ProcessGroup, weight: Callable[[], float]
    ) -> None:
        self._module = module
        self._group, self._host, self._weight = group, host, weight
        self._inside_log = self._inside_step = False
        self._logged: dict[str, _ResultMetric] = {}
        self._pending: list[Callable[[], None]] = []
        # comparisons are alike everywhere, those of batches too
        self._readers = group.size() if group.size() < dist.get_world_size() else 0
        self._divert: Callable[[str, Any, dict[str, Any]], None] | None = None
        #: of what kind values are that steps log and keep
        self.kinds = Kinds()
        self._told: set[str] = set()
        self._log = module.log
        self._metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
        self._own_groups = [(metric, metric.process_group, metric.dist_sync_on_step) for metric in self._metrics]
        module.__dict__["log"] = self
        for metric in self._metrics:
            metric.process_group = None if group.size() == dist.get_world_size() else group
            metric.dist_sync_on_step = True  # until `log` says that nobody asks for its step values

    def close(self) -> None:
        """Gives the module its own `log` and the metrics their own groups back."""
        self._module.__dict__.pop("log", None)
        for metric, group, on_step in self._own_groups:
            metric.process_group, metric.dist_sync_on_step = group, on_step

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """A copy of the module, which callbacks make to average its weights, logs nothing."""
        return _log_nothing

    # ---------------------------------------------------------------- what the user calls

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """`LightningModule.log` with `sync_dist=True`, except that step values wait for `reduce_step`."""
        named = dict(zip(("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"), args, strict=False)) | kwargs
        rest = dict(zip(("enable_graph", "sync_dist"), args[5:], strict=False)) if len(args) > 5 else {}
        options = {**named, **rest, "sync_dist": True}
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if self._divert is not None:
            return self._divert(name, value, options)
        if self._share == 0.0:
            value, options = _without_effect(value, options)
        self._inside_log = True
        try:
            self._log(name, value, **options)
        finally:
            self._inside_log = False
        key, result = self._find(name, options.get("add_dataloader_idx", True))
        if result is not None and not options.get("rank_zero_only", False):
            self._take(key, result)
        return None

    @property
    def defers(self) -> bool:
        """Whether a reduction asked for now is that of a step value, which is reduced here."""
        return self._inside_log

    @property
    def _share(self) -> float:
        results = self._module.trainer._results
        return 1.0 if results is None or results.batch is None else self._weight()

    def _find(self, name: str, add_dataloader_idx: bool) -> tuple[str, _ResultMetric | None]:
        results = self._module.trainer._results
        key = f"{self._module._current_fx_name}.{name}"
        if results is not None and add_dataloader_idx and results.dataloader_idx is not None:
            key += f".{results.dataloader_idx}"
        return key, None if results is None else results.get(key)

    def _take(self, key: str, result: _ResultMetric) -> None:
        if not result.is_tensor:
            at_most_on_step(
                result.value, [r for r in (self._module.trainer._results or {}).values() if not r.is_tensor]
            )
        if self._inside_step:
            self._logged[key] = result
            return
        if _has_step_value(result):
            self._start([result], _kind(result), self._share)()
        if result.meta.on_epoch and result.meta.fx.partition(".")[0].endswith("_epoch_end"):
            result.compute()  # now, while all ranks are here: callbacks may read it on one of them

    def tell(self, names: Iterable[str], what: str) -> None:
        """Says once of each name what is done with it that may not be what one device would do."""
        for name in set(names) - self._told:
            self._told.add(name)
            log.warning("%s %s", name, what)

    # ---------------------------------------------------------------- what the strategy calls

    @contextmanager
    def diverted(self, to: Callable[[str, Any, dict[str, Any]], None]) -> Iterator[None]:
        """Inside, what the user logs goes to `to`: its name, its value and the options."""
        before, self._divert = self._divert, to
        try:
            yield
        finally:
            self._divert = before

    @contextmanager
    def counting(self, share: float) -> Iterator[None]:
        """Around the user's step; with share 0.0 metrics stay as they are."""
        self._inside_step = True
        watched = list(self._counted_by(share))
        try:
            yield
        finally:
            self._inside_step = False
            for metric in watched:
                metric.close()

    def _counted_by(self, share: float) -> Iterator[Uncounted | Shared]:
        for metric in self._metrics if share != 1.0 else ():
            if share == 0.0:
                yield Uncounted(metric)
            elif isinstance(metric, MeanMetric):
                yield Shared(metric, share)

    def reduce_step(self, share: float) -> None:
        """Starts to reduce the step values that the user's step logged; `settle` puts them in place.

        Raises:
            ValueError: on every rank, in `settle`, if the names logged differ.
        """
        self.settle()
        if self._module.trainer.predicting:
            return
        names, results = list(self._logged), [r for r in self._logged.values() if _has_step_value(r)]
        if not names:
            return  # a rank on which there are any then compares with what the others say next, and all know
        self._logged = {}
        agree = self._start_agreement(names)
        reductions = [self._start(results, kind, share) for kind in ("sum", "min", "max")]
        self._pending = [agree, *reductions]

    def settle(self) -> None:
        """Waits for the step values under way and shows them to callbacks and loggers."""
        pending, self._pending = self._pending, []
        for finish in pending:
            finish()

    def _start_agreement(self, names: list[str]) -> Callable[[], None]:
        mark = (-2, -2, 0, zlib.crc32("\n".join(names).encode()))
        comparison = Comparison(mark, Requested(), self._host, Content(self._readers))
        return lambda: comparison.finish(lambda: LOGGED, lambda: ", ".join(names))

    def _start(self, results: list[_ResultMetric], kind: str, share: float) -> Callable[[], None]:
        chosen = [result for result in results if _kind(result) == kind]
        if not chosen:
            return lambda: None
        weights = [share / self._group.size() if result.meta.is_mean_reduction else 1.0 for result in chosen]
        values = [_step_value(result).double() * weight for result, weight in zip(chosen, weights, strict=True)]
        padding = [torch.zeros_like(values[0])] * (-len(values) % ROOM)
        packed = torch.stack([within_reach(value, self._group) for value in values + padding])
        work = Pending(dist.all_reduce(packed, op=OPERATIONS[kind], group=self._group, async_op=True))

        def finish() -> None:
            work.wait()
            for result, value in zip(chosen, packed.unbind(), strict=False):
                result._forward_cache = value.to(_step_value(result))
                if not result.meta.on_epoch:
                    result.value = result._forward_cache

        return finish


def _log_nothing(*_: Any, **__: Any) -> None:
    pass


def _has_step_value(result: _ResultMetric) -> bool:
    return bool(result.meta.on_step and result.is_tensor and result._forward_cache is not None)


def _step_value(result: _ResultMetric) -> Tensor:
    assert result._forward_cache is not None
    value: Tensor = result._forward_cache.detach().reshape(())
    return value


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
