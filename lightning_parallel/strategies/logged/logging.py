"""`self.log` and torchmetrics give on every rank the values of one device, without `sync_dist`.

Epoch values are reduced when Lightning computes them. Step values are reduced together, in one message per step that
travels while backward runs; with it ranks find out whether they logged the same names, as a reduction of what only some
ranks log would never end. What touches Lightning's private results is in this file and in `step_values`.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric, Metric

from lightning_parallel.collectives.functional import Pending, packed
from lightning_parallel.strategies.lightning_package import LightningModule, _ResultMetric, is_overridden
from lightning_parallel.strategies.logged.averages import Shared
from lightning_parallel.strategies.logged.kept.values import KeptValues
from lightning_parallel.strategies.logged.kind_watch import KindWatch
from lightning_parallel.strategies.logged.kinds import Kind
from lightning_parallel.strategies.logged.known_kinds import Kinds
from lightning_parallel.strategies.logged.metrics import MetricsOfRun, at_most_on_step
from lightning_parallel.strategies.logged.multiples import Counted, Multiples
from lightning_parallel.strategies.logged.reductions import Reductions, SeenKind, is_compiled
from lightning_parallel.strategies.logged.step_values import (
    StepValue,
    count_as_exactly,
    has_step_value,
    log_nothing,
    options_of,
    reduction_of,
    show,
    step_value,
    without_effect,
)
from lightning_parallel.strategies.logged.sums import OPERATIONS, BatchSums, OfMean, scale
from lightning_parallel.strategies.ranks.agreement import (
    BACKWARD,
    BEGUN,
    LOGGED,
    NOTHING,
    RETURNED,
    Comparison,
    Content,
)
from lightning_parallel.strategies.trainer.lightnings import require_reduction
from lightning_parallel.techniques.tools.means import Mean, Means, unwatched
from lightning_parallel.values import batch_size

log = logging.getLogger(__name__)


class StepLog:
    """Leads what one rank logs, so that all ranks that read different samples see the values of the whole batch.

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
        self._group, self._host, self._weight, self._ranks = group, host, weight, group.size()
        self._inside_log = self._inside_step = False
        self._logged: dict[str, StepValue] = {}
        self._pending: list[Callable[[], None]] = []
        #: those of the step that runs or ran last; none where no other rank reads other samples
        self.means: Means | None = None
        self._sums: BatchSums | None = None
        #: whether losses of training count by samples in any case
        self.counts_by_samples = False
        self._differed = False
        self._counted: tuple[Tensor, Tensor] | None = None
        # comparisons are alike everywhere, those of batches too
        self._content = Content(self._ranks) if self._ranks < dist.get_world_size() else None
        self._divert: Callable[[str, Any, dict[str, Any]], None] | None = None
        #: of what kind values are that steps log and keep
        self.kinds = Kinds()
        self._reductions = Reductions(self.kinds, host, self.tell)
        self._watch: KindWatch | None = None
        self._elsewhere: tuple[SeenKind, Sequence[OfMean]] | None = None
        self._told: set[str] = set()
        #: which values count as means do
        self.multiples = Multiples()
        self._may_leave = is_overridden("on_train_batch_start", module)  # by returning -1
        self._log = module.log
        self._metrics = MetricsOfRun(module, group, lambda: self._inside_step)
        module.__dict__["log"] = self

    @property
    def alone(self) -> bool:
        """Whether no other rank reads other samples."""
        return self._ranks == 1

    def close(self) -> None:
        """Gives the module its own `log` and the metrics their own groups back."""
        self._module.__dict__.pop("log", None)
        self._metrics.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """A copy of the module, which callbacks make to average its weights, logs nothing."""
        return log_nothing

    # ---------------------------------------------------------------- what the user calls

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """`LightningModule.log` with `sync_dist=True`, except that step values wait for `reduce_step`."""
        options = {**options_of(args, kwargs), "sync_dist": True}
        value = value.full_tensor() if isinstance(value, DTensor) else value
        value = self._metrics.of_all_ranks(value)
        if self._divert is not None:
            require_reduction(name, options)
            return self._divert(name, value, options)
        means = self.means if self._inside_step and self._elsewhere is None else None
        counted = self.multiples.counted(self._module._current_fx_name or "", name, value, means, self._watch)
        before, value = self._before(name, options), counted.value
        if self._share == 0.0:
            value, options = without_effect(value, options)
        self._inside_log = True
        try:
            with unwatched(), nullcontext() if self._watch is None else self._watch.paused():
                self._log(name, value, **options)
        finally:
            self._inside_log = False
        key, result = self._find(name, options.get("add_dataloader_idx", True))
        if result is not None and not options.get("rank_zero_only", False):
            self._take(key, result, counted, before)
        return None

    def log_as(self, seen: SeenKind, own: Sequence[OfMean], name: str, value: Any, options: dict[str, Any]) -> None:
        """Logs a value that was computed and seen elsewhere, and was made there of means of its own."""
        self._elsewhere = seen, own
        try:
            self(name, value, **options)
        finally:
            self._elsewhere = None

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

    def _before(self, name: str, options: dict[str, Any]) -> tuple[Any, Any] | None:
        """What an epoch's value was made of so far: these tensors are never changed in place."""
        connector, hook = self._module.trainer._logger_connector, self._module._current_fx_name or ""
        result = self._find(name, options.get("add_dataloader_idx", True))[1]
        if not self._inside_step or result is None or not result.is_tensor or connector.should_reset_tensors(hook):
            return None
        return result.value, result.cumulated_batch_size if result.meta.is_mean_reduction else 0

    def _take(self, key: str, result: _ResultMetric, counted: Counted, before: tuple[Any, Any] | None) -> None:
        if not result.is_tensor:
            at_most_on_step(
                result.value, [r for r in (self._module.trainer._results or {}).values() if not r.is_tensor]
            )
            result._forward_cache = self._metrics.of_all_ranks(result._forward_cache)
        if self._inside_step:
            count_as_exactly(result)
            seen, own = self._elsewhere or (self._seen_of(result, counted), ())
            value = counted.value
            kept = value.detach().clone() if isinstance(value, Tensor) else value
            self._logged[key] = StepValue(result, kept, value, counted.parts, before, seen, own=own)
            return
        if has_step_value(result):
            weight = self._share / self._ranks if result.meta.is_mean_reduction else 1.0
            (reduced,) = self._sent([step_value(result) * weight], reduction_of(result))()
            show(result, reduced)
        if result.meta.on_epoch and result.meta.fx.partition(".")[0].endswith("_epoch_end"):
            result.compute()  # now, while all ranks are here: callbacks may read it on one of them

    def _seen_of(self, result: _ResultMetric, counted: Counted) -> SeenKind:
        value, parts, function = counted
        if isinstance(value, Metric) or function:
            return SeenKind(Kind.MEAN if function else None, function=function)
        kind = None if self._watch is None else self._watch.kind_of(value)
        if kind is None:
            kind = next((each.seen.kind for each in self._logged.values() if each.origin is value), None)
        if kind is None:
            (kind,) = self.kinds.of(self._module._current_fx_name or "", ("logged", result.meta.name), [value], None)
        samples = None if self.means is None else batch_size(self.means.batch)
        doubtful = self._watch is not None and self._watch.doubtful
        seen = SeenKind.of(kind, value, samples, reduction_of(result), doubtful)
        return SeenKind(Kind.MEAN) if parts and seen.kind in (None, Kind.OTHER) else seen

    def tell(self, names: Iterable[str], what: str) -> None:
        """Warns once of each name, in one line, of what is done with it that one device may do otherwise."""
        if new := sorted(set(names) - self._told):
            self._told.update(new)
            log.warning("%s: %s", ", ".join(new), what)

    # ---------------------------------------------------------------- what the strategy calls

    @contextmanager
    def diverted(self, to: Callable[[str, Any, dict[str, Any]], None]) -> Iterator[None]:
        """Inside, what the user logs goes to `to`: its name, its value and the options."""
        before, self._divert = self._divert, to
        try:
            yield
        finally:
            self._divert = before

    def watching(self, batch: Any) -> AbstractContextManager[None]:
        """Around the user's code: in the first batches, of what kind the values are that it logs is seen."""
        watch = None if self.alone else self.kinds.watch(self._module._current_fx_name or "")
        if watch is None or is_compiled(self._module):
            return nullcontext()
        watch.samples = batch_size(batch)
        return self._watching(watch)

    @contextmanager
    def _watching(self, watch: KindWatch) -> Iterator[None]:
        self._watch = watch
        watch.take_as_same((*KeptValues(self._module).tensors(), *self._module.buffers()))
        try:
            with watch:
                yield
        finally:
            self._watch = None

    @contextmanager
    def counting(self, share: float) -> Iterator[None]:
        """Around the user's step, for its means; with share 0.0 metrics stay as they are."""
        if self._may_leave and self._module.trainer.training:  # and steps of some techniques wait for each other
            Comparison((-4, 0, 0, 0), NOTHING, self._host, self._content).finish(lambda: BEGUN, str)
        self._inside_step = True
        self.means, self._sums = Means() if self._ranks > 1 else None, None
        counted = None if share == 1.0 else self._counted_by(share)
        try:
            yield
        finally:
            self._inside_step = False
            if counted is not None:
                counted.close()

    def _counted_by(self, share: float) -> ExitStack:
        """Metrics count this rank's samples by their share until the stack is closed."""
        counted = ExitStack()
        for metric in self._metrics.all:
            if share == 0.0:
                counted.enter_context(self._metrics.uncounted(metric))
            elif isinstance(metric, MeanMetric):
                counted.callback(Shared(metric, share).close)
        return counted

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
        trainer = self._module.trainer
        trains = self.means is not None and self._module.automatic_optimization and trainer.training
        if not (trains or logged) or (logged and trainer.predicting):
            return  # a rank on which there is any then compares with what the others say next, and all know
        skips = trains and output is None
        said = f"{RETURNED} no loss and logged" if skips else LOGGED
        means = self._agree(-2, int(skips), said, list(logged))
        logged = self._agreed(logged)
        moving = [each for each in logged.values() if each.moves(means)]
        chosen = [each for each in moving if each.how in ("mean", "sum")]
        if chosen or means:
            self._sums = BatchSums([each.summed(share, self._ranks) for each in chosen], means, share, self._group)
        self._pending = [lambda: self._place(chosen, means)]
        for how in ("min", "max") if len(chosen) < len(moving) else ():
            if extremes := [each for each in moving if each.how == how]:
                sent = self._sent([each.extreme(share) for each in extremes], how)
                self._pending.append(partial(self._place_extremes, extremes, means, sent))

    def _agreed(self, logged: dict[str, StepValue]) -> dict[str, StepValue]:
        """The values, each with the way in which ranks put it together."""
        tensors = {key: each for key, each in logged.items() if each.result.is_tensor}
        if self._ranks == 1 or not tensors:
            return logged
        hook = self._module._current_fx_name or ""
        seen = {each.result.meta.name: (each.seen, len(each.own)) for each in tensors.values()}
        found = self._reductions.agreed(hook, seen)
        return {**logged, **{key: each.by(*found[each.result.meta.name]) for key, each in tensors.items()}}

    @contextmanager
    def around_backward(self, share: float, loss: Tensor, asked: bool) -> Iterator[None]:
        """Inside, it is known by what the gradients of means are multiplied; all ranks must call.

        Args:
            share: of this rank in the samples.
            loss: to be differentiated.
            asked: whether it is going to be asked what `counted` makes of it.
        """
        if self.means is not None and self._inside_step:
            self.means.before_backward(loss)
        if self._sums is None and self._inside_step and self.means is not None:
            means = self._agree(-3, 0, BACKWARD, [])
            if means:
                BatchSums([], means, share, self._group).values()
        if self._sums is not None:
            self._sums.values()
        if self.means is not None:
            self._counted = (loss.detach(), counted_loss(loss, self.means)) if asked else None
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
            scale(means, self._weight(), self._group, self._module.device)

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

    def _agree(self, what: int, more: int, said: str, names: list[str]) -> Sequence[Mean]:
        """The step's means if all ranks computed the same, else those that learn, or none; others count by samples."""
        by_samples = self.counts_by_samples and self._module.trainer.training
        means: Sequence[Mean] = [] if self.means is None or by_samples else [*self.means.all]
        learning = [mean for mean in means if mean.edge is not None]
        mark = (what, more, 0, zlib.crc32("\n".join(names).encode()))
        comparison = Comparison(mark, NOTHING, self._host, self._content, means=(len(means), len(learning)))
        comparison.finish(lambda: said, lambda: ", ".join(names))
        for each, same in zip((means, learning), comparison.same_means, strict=True):
            if same:
                return each
        if not self._differed and self._host.rank() == 0:
            log.warning(
                "ranks computed different numbers of losses in one step (here %d), so these count by samples, not by "
                "targets, in the mean over ranks",
                len(means),
            )
        self._differed = True
        return []

    def _place(self, logged: Sequence[StepValue], means: Sequence[Mean]) -> None:
        values = [] if self._sums is None else self._sums.values()
        for each, value in zip(logged, values, strict=True):
            each.place(value, means, self._ranks)

    def _place_extremes(
        self, logged: Sequence[StepValue], means: Sequence[Mean], sent: Callable[[], Sequence[Tensor]]
    ) -> None:
        for each, value in zip(logged, sent(), strict=True):
            each.place(value, means, self._ranks)

    def _sent(self, values: Sequence[Tensor], how: str) -> Callable[[], Sequence[Tensor]]:
        sent = packed([value.double() for value in values], self._group)
        work = Pending(dist.all_reduce(sent, op=OPERATIONS[how], group=self._group, async_op=True))

        def arrived() -> Sequence[Tensor]:
            work.wait()
            return sent.unbind()

        return arrived


def counted_loss(loss: Tensor, means: Means) -> Tensor:
    """The loss with the contributions of means multiplied as their gradients are, its other parts as they are."""
    counted = loss.detach()
    for mean, part in means.parts_of(loss).items():
        factor = mean.scale.factor
        counted = counted if factor is None else counted + part * (factor - 1).to(part)
    return counted
