"""`self.log` behaves as with `sync_dist=True`, and shows all ranks the values of the whole batch.

Values of ranks are combined by `reduce_fx`. A mean weighs by `batch_size`, the samples of the rank, and a mean loss of
torch's own or `lightning_parallel.mean` by its targets. Epoch values are reduced when Lightning computes them. Step
values are reduced together, in one message per step that travels while backward runs; with it ranks find out whether
they logged the same names, as a reduction of what only some ranks log would never end. What touches Lightning's private
results is in this file and in `step_values`.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.collectives.functional import Pending, packed
from lightning_parallel.strategies.data.batches import Batches
from lightning_parallel.strategies.lightning_package import LightningModule, _ResultMetric, is_overridden
from lightning_parallel.strategies.logged.metrics import MetricsOfRun, at_most_on_step
from lightning_parallel.strategies.logged.step_values import (
    StepValue,
    has_step_value,
    options_of,
    reduction_of,
    without_effect,
)
from lightning_parallel.strategies.logged.sums import OPERATIONS, BatchSums, scale
from lightning_parallel.strategies.ranks.sync import Exchange, Message, SyncPoint, Words
from lightning_parallel.strategies.trainer.lightnings import require_reduction
from lightning_parallel.techniques.step import BatchContext
from lightning_parallel.techniques.tools.means import Mean, Means

log = logging.getLogger(__name__)

T = TypeVar("T")


class StepLog:
    """Replaces `log` of a module, until `close`, so that ranks that read different samples log values of all of them.

    Args:
        module: the user's.
        group: the ranks that read different samples.
        host: all ranks, for messages of the host.
        batches: tells how much the batch at hand counts.
        microbatches: whether steps run on microbatches.
    """

    def __init__(
        self,
        module: LightningModule,
        group: dist.ProcessGroup,
        host: dist.ProcessGroup,
        batches: Batches,
        microbatches: bool,
    ) -> None:
        self._module, self._batches = module, batches
        self._group, self._host, self._ranks = group, host, group.size()
        #: whether a reduction asked for now is that of a step value, which is reduced here
        self.defers = False
        self._logged: dict[str, StepValue] = {}
        self._sums: BatchSums | None = None
        #: whether losses of training count by samples in any case
        self.counts_by_samples = False
        self._pending: list[tuple[list[StepValue], Callable[[], Sequence[Tensor]]]] = []
        self._reduced_by: Sequence[Mean] = ()
        #: the means of the step that runs or ran last; none where no other rank reads other samples
        self.means: Means | None = None
        self._differed = False
        self._counted: tuple[Tensor, Tensor] | None = None
        #: takes what is logged while a step runs on a microbatch: name, value, options
        self.divert: Callable[[str, Any, dict[str, Any]], None] | None = None
        #: attributes of the module of which it was said that other ranks do not get them
        self.told_attributes: set[str] = set()
        self._may_leave = is_overridden("on_train_batch_start", module)  # by returning -1
        self._log = module.log
        self.metrics = MetricsOfRun(module, group, microbatches)
        module.__dict__["log"] = self

    @property
    def alone(self) -> bool:
        """Whether no other rank reads other samples."""
        return self._ranks == 1

    def close(self) -> None:
        """Gives the module its own `log` and the metrics their own groups back."""
        self._module.__dict__.pop("log", None)
        self.metrics.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """A copy of the module, which callbacks make to average its weights, logs nothing."""
        return _log_nothing

    # ---------------------------------------------------------------- what the user calls

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """`LightningModule.log` with `sync_dist=True`, except that step values wait for `reduce_step`."""
        options = {**options_of(args, kwargs), "sync_dist": True}
        value = value.full_tensor() if isinstance(value, DTensor) else value
        value = self.metrics.of_all_ranks(value)
        if self.divert is not None:
            require_reduction(name, options)
            return self.divert(name, value, options)
        parts: Mapping[Mean, Tensor] = {}
        if self.metrics.in_step and self.means is not None and isinstance(value, Tensor):
            parts = {
                mean: part.detach().clone() for mean, part in self.means.parts_of(value).items()
            }  # as they are now
        return self.record(name, value, options, parts)

    def record(self, name: str, value: Any, options: dict[str, Any], parts: Mapping[Mean, Tensor]) -> None:
        """Let Lightning log a value, and remember it for `reduce_step`, or reduce it at once outside of a step.

        Args:
            name: under which it is logged.
            value: a number or a metric.
            options: of `self.log`.
            parts: contributions of the step's means to the value.
        """
        module, given, size = self._module, value, options.get("batch_size")
        results = module.trainer._results
        weight = 1.0 if results is None or results.batch is None else self._batches.weight
        if weight == 0.0:
            value, options = without_effect(value, options)
        self.defers = True
        try:
            self._log(name, value, **options)
        finally:
            self.defers = False
        key = f"{module._current_fx_name}.{name}"
        if results is not None and options.get("add_dataloader_idx", True) and results.dataloader_idx is not None:
            key += f".{results.dataloader_idx}"
        result = None if results is None else results.get(key)
        if results is None or result is None or options.get("rank_zero_only", False):
            return
        if not result.is_tensor:
            at_most_on_step(result.value, [each for each in results.values() if not each.is_tensor])
            result._forward_cache = self.metrics.of_all_ranks(result._forward_cache)
        else:
            kept = given.detach().clone() if isinstance(given, Tensor) else given
            samples = size if size is not None else 1 if results.batch_size is None else results.batch_size
            each = StepValue(result, reduction_of(result), kept, size, samples if weight else 0, parts)
            if self.metrics.in_step:
                _count_as_exactly(result)
                self._logged[key] = each
            elif has_step_value(result):
                each.place(self._sent([each], weight)()[0], ())
        if result.meta.on_epoch and result.meta.fx.partition(".")[0].endswith("_epoch_end"):
            result.compute()  # now, while all ranks are here: callbacks may read it on one of them

    # ---------------------------------------------------------------- what the strategy calls

    @contextmanager
    def step(self, batch: BatchContext) -> Iterator[None]:
        """Around the user's step, for its means; metrics do not count samples of weight 0."""
        if self._may_leave and self._module.trainer.training:  # and steps of some techniques wait for each other
            Exchange(Message(SyncPoint.STEP_BEGINS), self._host).wait(lambda: Words("a step that began"))
        self.metrics.in_step = True
        self.means, self._sums = Means() if self._ranks > 1 else None, None
        uncounted = [] if batch.weight else self.metrics.uncounted()
        try:
            yield
        finally:
            self.metrics.in_step = False
            for each in uncounted:
                each.close()

    def reduce_step(self, batch: BatchContext, output: Any) -> None:
        """Starts to reduce the step values that the user's step logged; `settle` puts them in place.

        Args:
            batch: of the step.
            output: of the user's step.

        Raises:
            ValueError: on every rank, if the names logged differ, or some ranks have a loss and others none.
        """
        self._finish()
        logged, self._logged = self._logged, {}
        trainer = self._module.trainer
        trains = self.means is not None and self._module.automatic_optimization and trainer.training
        if not (trains or logged) or (logged and trainer.predicting):
            return  # a rank on which there is any then compares with what the others say next, and all know
        skips = trains and output is None
        point = SyncPoint.STEP_WITHOUT_LOSS if skips else SyncPoint.STEP_ENDS
        said = "a step that returned no loss and logged" if skips else "a step that logged"
        means = self._agree(point, said, logged)
        moving = [each for each in logged.values() if each.moves(means)]
        added = [each for each in moving if each.how in ("mean", "sum")]
        self._reduced_by = means
        if added or means:
            summands = [each.summand(batch.weight, self._ranks) for each in added]
            self._sums = BatchSums(summands, means, batch.weight, self._group)
            self._pending.append((added, self._sums.values))
        for how in ("min", "max") if len(added) < len(moving) else ():
            if extremes := [each for each in moving if each.how == how]:
                self._pending.append((extremes, self._sent(extremes, batch.weight)))

    @contextmanager
    def around_backward(self, batch: BatchContext, loss: Tensor, asked: bool) -> Iterator[None]:
        """Inside, it is known by what the gradients of means are multiplied; all ranks must call.

        Args:
            batch: of the step.
            loss: to be differentiated.
            asked: whether it is going to be asked what `counted` makes of it.
        """
        means, in_step = self.means, self.metrics.in_step
        if means is not None and in_step:
            means.before_backward(loss)
            said = "a backward pass within a step"
            if self._sums is None and (agreed := self._agree(SyncPoint.BACKWARD, said, {})):
                BatchSums([], agreed, batch.weight, self._group).values()
        if self._sums is not None:
            self._sums.values()
        if means is not None:
            self._counted = (loss.detach(), counted_loss(loss, means)) if asked else None
        yield
        if self._module.automatic_optimization:
            self.settle()

    def settle(self) -> None:
        """Waits for the step values under way and shows them to callbacks and loggers; the step is over."""
        self._finish()
        self.means = self._sums = None

    def scale(self, means: Means) -> None:
        """Fills in by what the gradients of means are multiplied whose backward runs within the step."""
        if self._ranks > 1:
            scale(means, self._batches.weight, self._group, self._module.device)

    def counted(self, loss: Tensor) -> Tensor:
        """A loss that went backward, each mean in it counting in the average over ranks as its gradient does."""
        if self._counted is None:
            return loss
        value, counted = self._counted
        return torch.where(loss == value, counted, loss)

    # ---------------------------------------------------------------- messages

    def _finish(self) -> None:
        pending, self._pending = self._pending, []
        for logged, values in pending:
            for each, value in zip(logged, values(), strict=True):
                each.place(value, self._reduced_by)

    def _agree(self, point: SyncPoint, said: str, logged: Mapping[str, StepValue]) -> Sequence[Mean]:
        """The step's means if all ranks computed the same, else those that learn, or none; others count by samples."""
        by_samples = self.counts_by_samples and self._module.trainer.training
        means: Sequence[Mean] = [] if self.means is None or by_samples else [*self.means.all]
        learning = [mean for mean in means if mean.edge is not None]
        kinds = [f"{key} ({each.kind})" for key, each in logged.items()]
        checksum = zlib.crc32("\n".join(kinds).encode())
        message = Message(point, checksum=checksum, means=len(means), learned_means=len(learning))
        reply = Exchange(message, self._host).wait(lambda: Words(f"{said} {', '.join(kinds)}".rstrip()))
        if reply.same_means:
            return means
        if reply.same_learned_means:
            return learning
        if not self._differed and self._host.rank() == 0:
            log.warning(
                "ranks computed different numbers of losses in one step (here %d), so these count by samples, not by "
                "targets, in the mean over ranks",
                len(means),
            )
        self._differed = True
        return []

    def _sent(self, values: Sequence[StepValue], weight: float) -> Callable[[], Sequence[Tensor]]:
        """Starts to reduce values of one kind; returns what waits for them."""
        how = values[0].how
        if how in ("mean", "sum"):
            return BatchSums([each.summand(weight, self._ranks) for each in values], [], weight, self._group).values
        sent = packed([each.extreme(weight) for each in values], self._group)
        work = Pending(dist.all_reduce(sent, op=OPERATIONS[how], group=self._group, async_op=True))

        def arrived() -> Sequence[Tensor]:
            work.wait()
            return sent.unbind()

        return arrived


def _count_as_exactly(result: _ResultMetric) -> None:
    """Lets the samples of a mean in float64 count in it, too: ranks divide by the mean of their counts.

    That of integers has the default dtype, which has too few digits where samples do not divide evenly among ranks.
    """
    if result.meta.is_mean_reduction and isinstance(result.value, Tensor) and result.value.dtype == torch.float64:
        result.cumulated_batch_size = result.cumulated_batch_size.double()


def _log_nothing(*_: Any, **__: Any) -> None:
    """What a copy of a module logs."""


def counted_loss(loss: Tensor, means: Means) -> Tensor:
    """The loss with the contributions of means multiplied as their gradients are, its other parts as they are."""
    counted = loss.detach()
    for mean, part in means.parts_of(loss).items():
        factor = mean.scale.factor
        counted = counted if factor is None else counted + part * (factor - 1).to(part)
    return counted


class ObservedStep(Generic[T]):
    """Runs the user's step on the batch, and records its means.

    Args:
        step: the user's.
        log: what `self.log` of the module leads to.
    """

    def __init__(self, step: Callable[..., T], log: StepLog) -> None:
        self._step, self._log = step, log
        self.after_silent_call: Callable[[], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """Runs the step."""
        if self.after_silent_call is not None:
            return silently(self._step, self.after_silent_call, *args, **kwargs)
        if self._log.means is None:
            return self._step(*args, **kwargs)
        with self._log.means:
            return self._step(*args, **kwargs)


def silently(step: Callable[..., T], restore: Callable[[], None], *args: Any, **kwargs: Any) -> T:
    """Calls the step without notes of it, and takes back what it has changed."""
    try:
        return step(*args, **kwargs)
    finally:
        restore()
