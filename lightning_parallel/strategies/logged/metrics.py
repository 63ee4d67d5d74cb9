"""torchmetrics objects: their process group, samples that do not count, losses, and what a pipeline does to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from lightning_parallel.collectives.functional import within_reach
from lightning_parallel.strategies.lightning_internals import replaced


class MetricsOfRun:
    """The metrics of a module, which during a run are those of all ranks that read different samples.

    A collection updates one of those metrics for all whose states are alike after its first update. A rank sees a part
    of the first batch, in which states may be alike that are not on one device, as counts of hits that are 0 so far. So
    all ranks are asked. With microbatches each metric is updated by itself, unless the user named the groups.

    Args:
        module: the user's.
        group: the ranks.
        pipelined: whether steps run on microbatches.
        back: gives metrics their own groups back.

    Attributes:
        in_step: whether a step of the user's is running.
        last_stage: the rank of a pipeline whose metrics have seen the batches; None where all have.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, pipelined: bool, back: ExitStack) -> None:
        self.in_step = False
        self.last_stage: int | None = None
        self.names = {id(part): name for name, part in module.named_modules() if isinstance(part, Metric)}
        self.all = [metric for metric in module.modules() if isinstance(metric, Metric)]

        # a composition computes its value from other metrics
        computing = [metric for metric in self.all if group.size() > 1 and "compute" in vars(metric)]
        self.losses = {id(metric): LossMetric(metric, self) for metric in computing}
        for loss in self.losses.values():
            back.enter_context(replaced(loss.metric, "compute", loss.compute))
        for metric in self.all:
            before = {"process_group": metric.process_group, "dist_sync_on_step": metric.dist_sync_on_step}
            back.callback(vars(metric).update, before)
            # torchmetrics takes None for all ranks
            metric.process_group = None if group.size() == dist.get_world_size() else group
            metric.dist_sync_on_step = True  # until `log` says that nobody asks for its step values
        for collection in (part for part in module.modules() if isinstance(part, MetricCollection)):
            if pipelined:
                back.enter_context(replaced(collection, "_enable_compute_groups", False))
            elif group.size() > 1:
                back.enter_context(replaced(collection, "_equal_metric_states", AlikeOnAll(group)))

    def of_all_ranks(self, value: Any) -> Any:
        """Return the value to log: where a metric gave a step a loss of this rank, its value for all ranks."""
        if not (self.losses and isinstance(value, Tensor) and value.requires_grad):
            return value
        return next((loss.of_all_ranks for loss in self.losses.values() if loss.local is value), value)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, updates leave metrics as they are: they are given samples that another rank counts."""
        with ExitStack() as back:
            for metric in self.all:
                back.enter_context(Uncounted(metric, self.losses.get(id(metric))).updates())
            yield


class LossMetric:
    """A metric that gives a step the value of this rank where it has a graph, and `log` that of all ranks.

    torchmetrics gathers the states of other ranks without their graphs: the gradient of a loss that is a metric would
    be divided by the number of ranks. A loss is of this rank's samples, as every other loss is.

    Args:
        metric: the user's.
        run: tells whether a step of the user's is running.
    """

    def __init__(self, metric: Metric, run: MetricsOfRun) -> None:
        self.metric, self._run, self._compute = metric, run, vars(metric)["compute"]
        self.local: Any = None
        self.of_all_ranks: Any = None
        self.uncounted: Uncounted | None = None

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the metric's value for all ranks, and where the step may differentiate it also that of this rank."""
        metric = self.metric
        if not (self._run.in_step and torch.is_grad_enabled() and metric._to_sync and _has_graph(metric)):
            return self._compute(*args, **kwargs)
        # without the states of other ranks, whose graphs are not here
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


def _has_graph(metric: Metric) -> bool:
    states = pytree.tree_leaves([getattr(metric, name) for name in metric._defaults])
    return any(isinstance(state, Tensor) and state.requires_grad for state in states)


class AlikeOnAll:
    """Tells whether two metrics have equal states on all ranks of a group, which ask in one order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, one: Metric, other: Metric) -> bool:
        """Return whether they do. Collective over the group."""
        said = within_reach(torch.tensor(float(MetricCollection._equal_metric_states(one, other))), self._group)
        dist.all_reduce(said, dist.ReduceOp.MIN, group=self._group)
        return bool(said)

    def __reduce__(self) -> Any:
        """A copy of the collection, which callbacks make, asks as torchmetrics does."""
        return getattr, (MetricCollection, "_equal_metric_states")


class Uncounted:
    """Lets updates leave a metric as it is: it is given samples that another rank counts.

    Updates run all the same. A metric that keeps what it saw then holds empty tensors of the right kind, without which
    ranks could not put together what they hold.
    """

    def __init__(self, metric: Metric, loss: LossMetric | None) -> None:
        self._metric, self._loss, self._before, self._was_loss = metric, loss, _states(metric), False
        self._before_update, self._update = self._before, vars(metric)["update"]

    @contextmanager
    def updates(self) -> Iterator[None]:
        """Inside, updates have no effect; the effect of those of a loss, which needs its samples, ends with it."""
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
        """Run the metric's own update and take back what it did, that of a loss only at the end of `updates`."""
        self._before_update = _states(self._metric)
        self._update(*args, **kwargs)
        if _has_graph(self._metric):
            self._was_loss = True
        else:
            self.take_back()

    def take_back(self) -> None:
        """Take back what the last update did."""
        for name, state in self._before_update.items():
            after = getattr(self._metric, name)
            if not isinstance(state, Tensor):  # [] -> [tensor of shape (0, 5)]
                added = after[len(state) :]
                state = state + [each[:0] if each.dim() else each.new_empty(0) for each in added]
            setattr(self._metric, name, state)


def _states(metric: Metric) -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {name: state.clone() if isinstance(state, Tensor) else list(state) for name, state in states.items()}


def everything(metric: Metric) -> dict[str, Any]:
    """The states of a metric, and what it knows of its updates."""
    return {**_states(metric), "_update_count": metric._update_count, "_computed": metric._computed}
