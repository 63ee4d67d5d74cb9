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
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.strategies.data.batches import Batches
from lightning_parallel.strategies.lightning_internals import require_reduction
from lightning_parallel.strategies.lightning_package import LightningModule, _ResultMetric, is_overridden
from lightning_parallel.strategies.logged.metrics import MetricsOfRun, sync_on_step_where_logged
from lightning_parallel.strategies.logged.step_values import StepValue, options_of, without_effect
from lightning_parallel.strategies.logged.sums import StepReduction, scale
from lightning_parallel.strategies.ranks.sync import Exchange, Message, SyncPoint, Words
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
        batches: has the weight of the batch at hand.
        pipelined: whether steps run on microbatches.

    Attributes:
        defers: whether a reduction asked for now is that of a step value, which is reduced here.
        counts_by_samples: whether losses of training count by samples in any case.
        means: of the step that runs or ran last; None where no other rank reads other samples.
        divert: takes what is logged while a step runs on a microbatch: name, value, options.
        warned_attributes: attributes of the module of which a warning said that other ranks do not get them.
    """

    def __init__(
        self,
        module: LightningModule,
        group: dist.ProcessGroup,
        host: dist.ProcessGroup,
        batches: Batches,
        pipelined: bool,
    ) -> None:
        self._module, self._batches = module, batches
        self._group, self._host, self._ranks = group, host, group.size()
        self.defers = self.counts_by_samples = False
        self._logged: dict[str, StepValue] = {}
        #: of the values of a step under way, with these and the means by which they count
        self._reduction: StepReduction | None = None
        self._reduced: list[StepValue] = []
        self._reduced_by: Sequence[Mean] = ()
        self.means: Means | None = None
        self._differed = False
        self._counted: tuple[Tensor, Tensor] | None = None
        self.divert: Callable[[str, Any, dict[str, Any]], None] | None = None
        self.warned_attributes: set[str] = set()
        self._may_leave = is_overridden("on_train_batch_start", module)  # by returning -1
        self._log = module.log
        self.metrics = MetricsOfRun(module, group, pipelined)
        module.__dict__["log"] = self

    @property
    def alone(self) -> bool:
        """Whether no other rank reads other samples."""
        return self._ranks == 1

    def close(self) -> None:
        """Give the module its own `log` and the metrics their own groups back."""
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
            found = self.means.parts_of(value)
            parts = {mean: part.detach().clone() for mean, part in found.items()}  # as they are now
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
            sync_on_step_where_logged(result.value, [each for each in results.values() if not each.is_tensor])
            result._forward_cache = self.metrics.of_all_ranks(result._forward_cache)
        else:
            kept = given.detach().clone() if isinstance(given, Tensor) else given
            samples = size if size is not None else 1 if results.batch_size is None else results.batch_size
            each = StepValue(result, kept, size, samples if weight else 0, parts)
            if self.metrics.in_step:
                _count_as_exactly(result)
                self._logged[key] = each
            elif each.is_shown:
                reduction = StepReduction([each.term(weight, self._ranks)], [], weight, self._group)
                each.place(reduction.values()[0], ())
        if result.meta.on_epoch and result.meta.fx.partition(".")[0].endswith("_epoch_end"):
            result.compute()  # now, while all ranks are here: callbacks may read it on one of them

    # ---------------------------------------------------------------- what the strategy calls

    @contextmanager
    def step(self, batch: BatchContext) -> Iterator[None]:
        """Around the user's step, for its means; metrics do not count samples of weight 0."""
        if self._may_leave and self._module.trainer.training:  # and steps of some techniques wait for each other
            Exchange(Message(SyncPoint.STEP_BEGINS), self._host).wait(lambda: Words("a step that began"))
        self._place_reduced()
        self.metrics.in_step = True
        self.means, self._reduction = Means() if self._ranks > 1 else None, None
        try:
            with nullcontext() if batch.weight else self.metrics.uncounted():
                yield
        finally:
            self.metrics.in_step = False

    def reduce_step(self, batch: BatchContext, output: Any) -> None:
        """Start to reduce the step values that the user's step logged; `settle` puts them in place.

        Args:
            batch: of the step.
            output: of the user's step.

        Raises:
            ValueError: on every rank, if the names logged differ, or some ranks have a loss and others none.
        """
        self._place_reduced()
        logged, self._logged = self._logged, {}
        trainer = self._module.trainer
        trains = self.means is not None and self._module.automatic_optimization and trainer.training
        if not (trains or logged) or (logged and trainer.predicting):
            return  # a rank on which there is any then compares with what the others say next, and all know
        skips = trains and output is None
        point = SyncPoint.STEP_WITHOUT_LOSS if skips else SyncPoint.STEP_ENDS
        means = self._agree(point, "a step that returned no loss and logged" if skips else "a step that logged", logged)
        reduced = [each for each in logged.values() if each.is_shown or each.changes_epoch(means)]
        if reduced or means:
            terms = [each.term(batch.weight, self._ranks) for each in reduced]
            self._reduction = StepReduction(terms, means, batch.weight, self._group)
            self._reduced, self._reduced_by = reduced, means

    @contextmanager
    def around_backward(self, batch: BatchContext, loss: Tensor, asked: bool) -> Iterator[None]:
        """Inside, the factors of the gradients of means are known. Collective.

        Args:
            batch: of the step.
            loss: to be differentiated.
            asked: whether `counted` is going to be called with the loss.
        """
        means, in_step = self.means, self.metrics.in_step
        if means is not None and in_step:
            means.before_backward(loss)
            said = "a backward pass within a step"
            if self._reduction is None and (agreed := self._agree(SyncPoint.BACKWARD, said, {})):
                StepReduction([], agreed, batch.weight, self._group).values()
        if self._reduction is not None:
            self._reduction.values()
        if means is not None:
            self._counted = (loss.detach(), counted_loss(loss, means)) if asked else None
        yield
        if self._module.automatic_optimization:
            self.settle()

    def settle(self) -> None:
        """Wait for the step values under way and put them where callbacks and loggers find them; the step is over."""
        self._place_reduced()
        self.means = self._reduction = None

    def scale(self, means: Means) -> None:
        """Set the factors of the gradients of means whose backward runs within the step."""
        if self._ranks > 1:
            scale(means, self._batches.weight, self._group, self._module.device)

    def counted(self, loss: Tensor) -> Tensor:
        """A loss that went backward, each mean in it counting in the average over ranks as its gradient does."""
        if self._counted is None:
            return loss
        value, counted = self._counted
        return torch.where(loss == value, counted, loss)

    # ---------------------------------------------------------------- messages

    def _place_reduced(self) -> None:
        reduced, self._reduced = self._reduced, []
        if reduced and self._reduction is not None:
            for each, value in zip(reduced, self._reduction.values(), strict=True):
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


def _count_as_exactly(result: _ResultMetric) -> None:
    """Let the samples of a mean in float64 count in it, too: Lightning divides by the mean of the ranks' counts.

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
        """Run the step."""
        if self.after_silent_call is not None:
            return silently(self._step, self.after_silent_call, *args, **kwargs)
        with nullcontext() if self._log.means is None else self._log.means:
            return self._step(*args, **kwargs)


def silently(step: Callable[..., T], restore: Callable[[], None], *args: Any, **kwargs: Any) -> T:
    """Call the step without recording it, and take back what it has changed."""
    try:
        return step(*args, **kwargs)
    finally:
        restore()
