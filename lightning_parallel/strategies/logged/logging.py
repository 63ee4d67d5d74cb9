"""`self.log` and torchmetrics give on every rank the values of one device, without `sync_dist`.

Epoch values are reduced when Lightning computes them. Step values are reduced together, in one message per step that
travels while backward runs; with it ranks find out whether they logged the same names, as a reduction of what only some
ranks log would never end. Everything here that touches Lightning's private results is in this file.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from lightning_parallel.strategies.logged.first_losses import FirstLosses
from lightning_parallel.strategies.logged.kinds import Kinds
from lightning_parallel.strategies.logged.metrics import Uncounted, at_most_on_step
from lightning_parallel.strategies.logged.sums import BatchSums, Summed, single_samples
from lightning_parallel.strategies.ranks.agreement import BACKWARD, LOGGED, RETURNED, Comparison, Content
from lightning_parallel.strategies.ranks.signals import Requested
from lightning_parallel.techniques.tools.means import Means

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
        self._logged: dict[str, _Logged] = {}
        self._pending: list[Callable[[], None]] = []
        #: those of the step that runs or ran last; none where no other rank reads other samples
        self.means: Means | None = None
        self._sums: BatchSums | None = None
        self._differed = False
        self._losses = FirstLosses(group.size())
        self._counted: tuple[Tensor, Tensor] | None = None
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
        means = self.means if self._inside_step else None
        parts = means.parts_of(value) if means is not None and isinstance(value, Tensor) else {}
        before = self._samples_of(self._find(name, options.get("add_dataloader_idx", True))[1]) if parts else 0
        if self._share == 0.0:
            value, options = _without_effect(value, options)
        self._inside_log = True
        try:
            self._log(name, value, **options)
        finally:
            self._inside_log = False
        key, result = self._find(name, options.get("add_dataloader_idx", True))
        if result is not None and not options.get("rank_zero_only", False):
            self._take(key, result, value, parts, before)
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

    @staticmethod
    def _samples_of(result: _ResultMetric | None) -> Any:
        if result is None or not result.is_tensor or not result.meta.is_mean_reduction:
            return 0
        return result.cumulated_batch_size

    def _take(self, key: str, result: _ResultMetric, value: Any, parts: dict[int, Tensor], before: Any) -> None:
        if not result.is_tensor:
            at_most_on_step(
                result.value, [r for r in (self._module.trainer._results or {}).values() if not r.is_tensor]
            )
        if self._inside_step:
            self._logged[key] = _Logged(result, value, parts, self._samples_of(result) - before if parts else 0)
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
        """Around the user's step, for its means; with share 0.0 metrics stay as they are."""
        self._inside_step = True
        self.means, self._sums = Means() if self._group.size() > 1 else None, None
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

    def reduce_step(self, share: float, output: Any) -> None:
        """Starts to reduce the step values that the user's step logged; `settle` puts them in place.

        Args:
            share: of this rank in the samples.
            output: of the user's step.

        Raises:
            ValueError: on every rank, if the names logged differ, or some ranks have a loss and others none.
        """
        self._finish()
        logged, self._logged = self._logged, {}
        trainer, trains = self._module.trainer, self.means is not None and self._module.automatic_optimization
        if trainer.predicting or not (logged or (trains and trainer.training)):
            return  # a rank on which there is any then compares with what the others say next, and all know
        skips = trains and trainer.training and output is None
        said = f"{RETURNED} no loss and logged" if skips else LOGGED
        means = self._agree(-2, int(skips), said, list(logged))
        chosen = [each for each in logged.values() if each.is_summed(means)]
        weight = share / self._group.size()
        if chosen or means.all:
            self._sums = BatchSums([each.summed(weight) for each in chosen], means, share, self._group)
        results = [each.result for each in logged.values() if _has_step_value(each.result)]
        extremes = [self._start(results, kind, share) for kind in ("min", "max")]
        self._pending = [lambda: self._place(chosen, means), *extremes]

    @contextmanager
    def around_backward(self, share: float, loss: Tensor, asked: bool) -> Iterator[None]:
        """Inside, it is known by what the gradients of means are multiplied; all ranks must call.

        Args:
            share: of this rank in the samples.
            loss: to be differentiated.
            asked: whether it is going to be asked what `counted` makes of it.
        """
        if self._sums is None and self._inside_step and self.means is not None:
            means = self._agree(-3, 0, BACKWARD, [])
            if means.all:
                BatchSums([], means, share, self._group).values()
        if self._sums is not None:
            self._sums.values()
        if self.means is not None:
            self._losses.look(loss, self.means)
            self._counted = (loss.detach(), self.means.counted(loss)) if asked else None
        yield
        if self._module.automatic_optimization:
            self.settle()

    def settle(self) -> None:
        """Waits for the step values under way and shows them to callbacks and loggers; the step is over."""
        self._finish()
        self._losses.end()
        self.means = self._sums = None

    def counted(self, loss: Tensor) -> Tensor:
        """A loss that went backward, each mean in it counting in the average over ranks as its gradient does."""
        if self._counted is None:
            return loss
        value, counted = self._counted
        return torch.where(loss == value, counted, loss)

    def _finish(self) -> None:
        pending, self._pending = self._pending, []
        for finish in pending:
            finish()

    def _agree(self, what: int, more: int, said: str, names: list[str]) -> Means:
        """The means of the step, if all ranks computed as many; else none, and losses count by samples."""
        means = self.means or Means()
        numbers = (len(means.all) << 16) + len(single_samples(means))
        mark = (what, more, 0, zlib.crc32("\n".join(names).encode()))
        comparison = Comparison(mark, Requested(), self._host, Content(self._readers), means=numbers)
        comparison.finish(lambda: said, lambda: ", ".join(names))
        if comparison.same_means:
            return means
        if not self._differed and dist.get_rank() == 0:
            log.warning(
                "ranks computed different numbers of losses in one step (here %d), so these count by samples, not by "
                "targets, in the mean over ranks",
                len(means.all),
            )
        self._differed = True
        return Means()

    def _place(self, logged: Sequence[_Logged], means: Means) -> None:
        values = [] if self._sums is None else self._sums.values()
        for each, value in zip(logged, values, strict=True):
            result = each.result
            if _has_step_value(result):
                result._forward_cache = value.to(_step_value(result))
                if not result.meta.on_epoch:
                    result.value = result._forward_cache
            if result.meta.on_epoch and each.parts and means.all:
                own = each.value.detach().to(value)
                result.value = result.value + ((value - own) * each.samples).to(result.value)

    def _start(self, results: list[_ResultMetric], kind: str, share: float) -> Callable[[], None]:
        chosen = [result for result in results if _kind(result) == kind]
        if not chosen:
            return lambda: None
        weights = [share / self._group.size() if result.meta.is_mean_reduction else 1.0 for result in chosen]
        values = [_step_value(result).double() * weight for result, weight in zip(chosen, weights, strict=True)]
        packed = torch.stack([within_reach(value, self._group) for value in values])
        work = Pending(dist.all_reduce(packed, op=OPERATIONS[kind], group=self._group, async_op=True))

        def finish() -> None:
            work.wait()
            for result, value in zip(chosen, packed.unbind(), strict=True):
                result._forward_cache = value.to(_step_value(result))
                if not result.meta.on_epoch:
                    result.value = result._forward_cache

        return finish


@dataclass(frozen=True)
class _Logged:
    """What a step logged under one name.

    Attributes:
        result: Lightning's.
        value: as it was given.
        parts: what means contribute to it, by their numbers.
        samples: as how many it counts in the epoch.
    """

    result: _ResultMetric
    value: Any
    parts: dict[int, Tensor]
    samples: Any

    def is_summed(self, means: Means) -> bool:
        """Whether it travels as a sum: with its step value, or because its means are not those of this rank."""
        mean_of_epoch = self.result.is_tensor and self.result.meta.on_epoch and self.result.meta.is_mean_reduction
        return _kind(self.result) == "sum" and (_has_step_value(self.result) or bool(means.all and mean_of_epoch))

    def summed(self, weight: float) -> Summed:
        """This rank's part of it."""
        if not self.result.meta.is_mean_reduction:
            return Summed(_step_value(self.result), 1.0, {})
        return Summed(torch.as_tensor(self.value), weight, self.parts)


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
