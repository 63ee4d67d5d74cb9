"""Makes torchmetrics objects have the values of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_mean

from lightning_parallel.collectives.functional import within_reach
from lightning_parallel.collectives.point_to_point import share_object
from lightning_parallel.strategies.lightning_package import _ResultMetric


class MetricsOfRun:
    """The metrics of a module, which until `close` are those of all ranks that read different samples.

    A collection updates one of those metrics for all whose states are alike after its first update. A rank sees a part
    of the first batch, in which states may be alike that are not on one device, as counts of hits that are 0 so far. So
    all ranks are asked.

    Args:
        module: the user's.
        group: the ranks.
        in_step: whether a step of the user's is running.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, in_step: Callable[[], bool]) -> None:
        self.all = [metric for metric in module.modules() if isinstance(metric, Metric)]
        self._collections = [each for each in module.modules() if isinstance(each, MetricCollection)]
        self._own_groups = [(metric, metric.process_group, metric.dist_sync_on_step) for metric in self.all]
        # a composition computes its value from other metrics
        computing = [metric for metric in self.all if group.size() > 1 and "compute" in vars(metric)]
        self._losses = {id(metric): LossMetric(metric, in_step) for metric in computing}
        for metric in self.all:
            metric.process_group = None if group.size() == dist.get_world_size() else group
            metric.dist_sync_on_step = True  # until `log` says that nobody asks for its step values
        for collection in self._collections if group.size() > 1 else ():
            vars(collection)["_equal_metric_states"] = AlikeOnAll(group)

    def of_all_ranks(self, value: Any) -> Any:
        """Return the value to log: where a metric gave a step a loss of this rank, its value for all ranks."""
        is_loss = isinstance(value, Tensor) and value.requires_grad
        found = (loss.of_all_ranks for loss in self._losses.values() if is_loss and loss.local is value)
        return next(found, value)

    @contextmanager
    def uncounted(self, metric: Metric) -> Iterator[None]:
        """Let the updates of a step leave the metric as it is; the value that the step gets is of its samples."""
        uncounted, loss = Uncounted(metric), self._losses.get(id(metric))
        if loss is not None:
            loss.uncounted = uncounted
        try:
            yield
        finally:
            uncounted.close()
            if loss is not None:
                loss.uncounted = None

    def close(self) -> None:
        """Gives metrics their own groups back."""
        for loss in self._losses.values():
            loss.close()
        for metric, group, on_step in self._own_groups:
            metric.process_group, metric.dist_sync_on_step = group, on_step
        for collection in self._collections:
            vars(collection).pop("_equal_metric_states", None)


class LossMetric:
    """Until `close`, a metric gives a step the value of this rank where it has a graph, and `log` that of all ranks.

    torchmetrics gathers the states of other ranks without their graphs: the gradient of a loss that is a metric would
    be divided by the number of ranks. A loss is of this rank's samples, as every other loss is.

    Args:
        metric: the user's.
        in_step: whether a step of the user's is running.
    """

    def __init__(self, metric: Metric, in_step: Callable[[], bool]) -> None:
        self._metric, self._in_step, self._compute = metric, in_step, vars(metric)["compute"]
        self.local: Any = None
        self.of_all_ranks: Any = None
        self.uncounted: Uncounted | None = None
        vars(metric)["compute"] = self.compute

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the metric's value for all ranks, and where the step may differentiate it also that of this rank."""
        metric = self._metric
        if not (self._in_step() and torch.is_grad_enabled() and metric._to_sync and _has_graph(metric)):
            return self._compute(*args, **kwargs)
        metric._to_sync = False
        local = self._compute(*args, **kwargs)
        metric._to_sync, metric._computed = True, None
        if self.uncounted is not None:
            self.uncounted.take_back()  # samples that another rank counts are part of this rank's loss only
        with torch.no_grad():
            of_all_ranks = self._compute(*args, **kwargs)
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(local)):
            return of_all_ranks
        metric._computed, self.local, self.of_all_ranks = None, local, of_all_ranks
        return local

    def close(self) -> None:
        """Gives the metric its own compute back."""
        vars(self._metric)["compute"] = self._compute


def _has_graph(metric: Metric) -> bool:
    states = pytree.tree_leaves([getattr(metric, name) for name in metric._defaults])
    return any(isinstance(state, Tensor) and state.requires_grad for state in states)


class AlikeOnAll:
    """Whether two metrics have equal states on all ranks, which ask in one order.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, one: Metric, other: Metric) -> bool:  # noqa: D102
        said = within_reach(torch.tensor(float(MetricCollection._equal_metric_states(one, other))), self._group)
        dist.all_reduce(said, dist.ReduceOp.MIN, group=self._group)
        return bool(said)

    def __reduce__(self) -> Any:
        """A copy of the collection, which callbacks make, asks as torchmetrics does."""
        return getattr, (MetricCollection, "_equal_metric_states")


class GroupsOfBatch:
    """Until `close`, a collection updates each of its metrics: whose states are equal is asked of a whole batch.

    Args:
        collection: may get its first batch in parts.
    """

    def __init__(self, collection: MetricCollection) -> None:
        self._collection = collection
        self._is_asked = bool(collection._enable_compute_groups) and not collection._groups_checked
        if self._is_asked:
            vars(collection)["_merge_compute_groups"] = _merge_nothing

    def close(self) -> None:
        """Finds the groups, if there was an update: calls, which update too, leave them out on one device."""
        if not self._is_asked:
            return
        collection = self._collection
        del vars(collection)["_merge_compute_groups"]
        counts = [metric._update_count for metric in collection.values(copy_state=False)]  # none of what was undone
        collection._groups_checked = collection._groups_checked and any(counts)
        if collection._groups_checked:
            collection._merge_compute_groups()
            collection._compute_groups_create_state_ref()


def _merge_nothing() -> None:
    """Stands for what finds the groups of a collection."""


class Uncounted:
    """Until `close`, updates leave a metric as it is: it is given samples that another rank counts.

    Updates run all the same. A metric that keeps what it saw then holds empty tensors of the right kind, without which
    ranks could not put together what they hold.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric, self._before, self._was_loss = metric, _states(metric), False
        self._before_update = self._before
        self._update = metric.__dict__["update"]
        metric.__dict__["update"] = self.update

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Runs the metric's own update and takes back what it did, a loss' only in `close`: it needs its samples."""
        self._before_update = _states(self._metric)
        self._update(*args, **kwargs)
        if _has_graph(self._metric):
            self._was_loss = True
        else:
            self.take_back()

    def take_back(self) -> None:
        """Takes back what the last update did."""
        self._restore(self._before_update)

    def _restore(self, before: dict[str, Any]) -> None:
        for name, state in before.items():
            setattr(self._metric, name, _emptied(state, getattr(self._metric, name)))

    def close(self) -> None:
        """Gives the metric its own update back."""
        self._metric.__dict__["update"] = self._update
        if self._was_loss:
            self._restore(self._before)


def _copied(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state)


def _emptied(before: Any, after: Any) -> Any:
    if isinstance(before, Tensor):
        return before
    return before + [added[:0] if added.dim() else added.new_empty(0) for added in after[len(before) :]]


def at_most_on_step(metric: Metric, results: Iterable[_ResultMetric]) -> None:
    """A metric whose values in single steps nobody logs need not gather them."""
    metric.dist_sync_on_step = any(result.meta.on_step for result in results if result.value is metric)


class UndoableMetric:
    """Remembers what a metric held before its first update of a run that may be broken off.

    Args:
        metric: watched until `close`.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._before: dict[str, Any] | None = None
        self._update = metric.__dict__["update"]
        metric.__dict__["update"] = self.update

    def update(self, *args: Any, **kwargs: Any) -> None:
        """The metric's own update."""
        if self._before is None:
            self._before = _everything(self._metric)
        self._update(*args, **kwargs)

    def undo(self) -> None:
        """The updates never happened."""
        if self._before is not None:
            _hold(self._metric, self._before)

    def close(self) -> None:
        """Gives the metric its own update back."""
        self._metric.__dict__["update"] = self._update


class BatchMetric:
    """A metric that is called on the parts of a batch, and tells its value for all of them.

    From its first call on it holds the batch alone; `value` ends that, and adds the batch to what it held.

    Args:
        metric: watched until `close`.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._before: dict[str, Any] | None = None
        #: what the last call returned, by which it is recognised when it is logged
        self.value_of_batch: Any = None
        self._syncs, metric.dist_sync_on_step = metric.dist_sync_on_step, False
        self._separable = not metric.full_state_update and dim_zero_mean not in metric._reductions.values()
        vars(metric)["forward"] = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The metric's own forward."""
        if self._before is None and self._separable:
            self._before = _everything(self._metric)
            self._metric.reset()
        self.value_of_batch = type(self._metric).forward(self._metric, *args, **kwargs)
        return self.value_of_batch

    def value(self) -> Any:
        """The value for the batch, over all ranks that read its other samples where somebody asks for it."""
        if self._before is None:
            return self._metric._forward_cache
        metric = self._metric
        metric._to_sync = self._syncs
        with torch.no_grad():  # what is logged, no loss
            value = metric.compute()
        metric._to_sync = metric.sync_on_compute
        self._add_before()
        return value

    def _add_before(self) -> None:
        metric, before, self._before = self._metric, self._before, None
        if before is not None:
            metric._computed = None
            metric._update_count += before["_update_count"]
            metric._reduce_states({name: before[name] for name in metric._defaults})

    def close(self) -> None:
        """Gives the metric its own forward back, and what it held."""
        self._add_before()
        vars(self._metric).pop("forward")
        self._metric.dist_sync_on_step = self._syncs


def _states(metric: Metric) -> dict[str, Any]:
    return {name: _copied(getattr(metric, name)) for name in metric._defaults}


def _everything(metric: Metric) -> dict[str, Any]:
    return {**_states(metric), "_update_count": metric._update_count, "_computed": metric._computed}


def _hold(metric: Metric, held: dict[str, Any]) -> None:
    for name, value in held.items():
        setattr(metric, name, value)


def share_metrics(metrics: Iterable[Metric], source: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Gives all ranks of the group what the metrics of its rank `source` hold."""
    metrics = list(metrics)
    if not metrics:
        return
    held = [pytree.tree_map_only(Tensor, Tensor.cpu, _everything(metric)) for metric in metrics]
    for metric, shared in zip(metrics, share_object(held, source, group, device), strict=True):
        _hold(metric, pytree.tree_map_only(Tensor, partial(Tensor.to, device=metric.device), shared))
