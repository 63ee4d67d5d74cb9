"""Metrics of torchmetrics during a run: their process group, samples of weight 0, metrics as losses, pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from lightning_parallel.collectives.functional import to_group_device
from lightning_parallel.strategies.lightning_internals import replaced


class ModuleMetrics:
    """Metrics of a module; during a run they synchronize over the ranks that read different samples.

    A `MetricCollection` puts metrics with equal states after the first update into one compute group and from then on
    updates one of them for all. On a rank's part of the first batch states may be equal that would differ on one
    device, e.g. counts of hits that are still 0. So metrics share a group only if their states are equal on all ranks.
    With microbatches each metric is updated by itself, unless the user named the groups.

    Args:
        module: the user's.
        group: the ranks that read different samples.
        pipelined: whether steps run on microbatches.
        back: restores the metrics' own process groups and methods when it is closed.

    Attributes:
        in_step: whether the user's step is running.
        last_stage: rank of the last stage in its pipeline, the only one whose metrics were updated; None if all were.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, pipelined: bool, back: ExitStack) -> None:
        self.in_step = False
        self.last_stage: int | None = None
        self.names = {id(part): name for name, part in module.named_modules() if isinstance(part, Metric)}
        self.all = [metric for metric in module.modules() if isinstance(metric, Metric)]

        # compositions (`metric_a + metric_b`) are left out: they compute their value from other metrics
        computing = [metric for metric in self.all if group.size() > 1 and "compute" in vars(metric)]
        self.losses = {id(metric): LossMetric(metric, self) for metric in computing}
        for loss in self.losses.values():
            back.enter_context(replaced(loss.metric, "compute", loss.compute))
        for metric in self.all:
            before = {"process_group": metric.process_group, "dist_sync_on_step": metric.dist_sync_on_step}
            back.callback(vars(metric).update, before)
            # for torchmetrics None means all ranks
            metric.process_group = None if group.size() == dist.get_world_size() else group
            metric.dist_sync_on_step = True  # until `StepLog.record` finds that nobody logs its step values
        for collection in (part for part in module.modules() if isinstance(part, MetricCollection)):
            if pipelined:
                back.enter_context(replaced(collection, "_enable_compute_groups", False))
            elif group.size() > 1:
                back.enter_context(replaced(collection, "_equal_metric_states", EqualOnAllRanks(group)))

    def of_all_ranks(self, value: Any) -> Any:
        """Return the value to log: the metric's value for all ranks if `value` is the local loss of a metric."""
        if not (self.losses and isinstance(value, Tensor) and value.requires_grad):
            return value
        return next((loss.of_all_ranks for loss in self.losses.values() if loss.local is value), value)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, updates leave all metrics unchanged: another rank counts the samples of this batch."""
        with ExitStack() as back:
            for metric in self.all:
                back.enter_context(UndoneUpdates(metric, self.losses.get(id(metric))).updates())
            yield


class LossMetric:
    """Metric that may be a loss: the step gets the local value with its graph, and `log` the value for all ranks.

    torchmetrics gathers the states of other ranks without their graphs, so the gradient of a synchronized value would
    be divided by the number of ranks. `local`, which the step gets, is over this rank's samples, as every other loss;
    `of_all_ranks` is the metric's value at the same time for `log`.

    Args:
        metric: the user's.
        run: says whether the user's step is running.
    """

    def __init__(self, metric: Metric, run: ModuleMetrics) -> None:
        self.metric, self._run, self._compute = metric, run, vars(metric)["compute"]
        self.local: Any = None
        self.of_all_ranks: Any = None
        self.uncounted: UndoneUpdates | None = None

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the value for all ranks; return the local one if the step may differentiate it. Collective."""
        metric = self.metric
        if not (self._run.in_step and torch.is_grad_enabled() and metric._to_sync and _has_graph(metric)):
            return self._compute(*args, **kwargs)
        # without the states of other ranks, which come without graphs
        metric._to_sync = False
        try:
            local = self._compute(*args, **kwargs)
        finally:
            metric._to_sync = True
        metric._computed = None
        if self.uncounted is not None:
            self.uncounted.take_back()  # samples of weight 0 count in this rank's loss only
        with torch.no_grad():
            of_all_ranks = self._compute(*args, **kwargs)
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(local)):
            return of_all_ranks
        metric._computed, self.local, self.of_all_ranks = None, local, of_all_ranks
        return local


def _has_graph(metric: Metric) -> bool:
    states = pytree.tree_leaves([getattr(metric, name) for name in metric._defaults])
    return any(isinstance(state, Tensor) and state.requires_grad for state in states)


class EqualOnAllRanks:
    """Compares the states of two metrics over all ranks of a group, which must compare in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, one: Metric, other: Metric) -> bool:
        """Return whether the states are equal on every rank. Collective over the group."""
        equal = to_group_device(torch.tensor(float(MetricCollection._equal_metric_states(one, other))), self._group)
        dist.all_reduce(equal, dist.ReduceOp.MIN, group=self._group)
        return bool(equal)

    def __reduce__(self) -> Any:
        """Let copies of the collection, which callbacks make, compare as torchmetrics does, without messages."""
        return getattr, (MetricCollection, "_equal_metric_states")


class UndoneUpdates:
    """Undoes the updates of a metric by samples that another rank counts.

    The updates do run: a metric that stores samples in a list then holds empty tensors of the right shape and dtype,
    which ranks need to concatenate their lists.
    """

    def __init__(self, metric: Metric, loss: LossMetric | None) -> None:
        self._metric, self._loss, self._before, self._was_loss = metric, loss, _states(metric), False
        self._before_update, self._update = self._before, vars(metric)["update"]

    @contextmanager
    def updates(self) -> Iterator[None]:
        """Inside, updates are undone: at once, or at the end if the metric is a loss, which needs its samples."""
        if self._loss is not None:
            self._loss.uncounted = self
        try:
            with replaced(self._metric, "update", self.update):
                yield
        finally:
            if self._loss is not None:
                self._loss.uncounted = None
            if self._was_loss:
                self._before_update = self._before
                self.take_back()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Run the metric's own update, and undo it at once unless the metric is a loss."""
        self._before_update = _states(self._metric)
        self._update(*args, **kwargs)
        if _has_graph(self._metric):
            self._was_loss = True
        else:
            self.take_back()

    def take_back(self) -> None:
        """Undo the last update; entries that it added to lists stay, without samples."""
        for name, state in self._before_update.items():
            after = getattr(self._metric, name)
            if not isinstance(state, Tensor):  # [] -> [tensor of shape (0, 5)]
                added = after[len(state) :]
                state = state + [entry[:0] if entry.dim() else entry.new_empty(0) for entry in added]
            setattr(self._metric, name, state)


def _states(metric: Metric) -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {name: state.clone() if isinstance(state, Tensor) else list(state) for name, state in states.items()}


def snapshot_metric(metric: Metric) -> dict[str, Any]:
    """Return the states of a metric, its number of updates and its cached value."""
    return {**_states(metric), "_update_count": metric._update_count, "_computed": metric._computed}
