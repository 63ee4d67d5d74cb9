"""A user's step that runs in parts, perhaps on another rank: what it logs, counts and keeps, once and on every rank.

While parts of a batch run, `self.log` is only noted, what the step keeps on the module is taken back, and metrics see
the parts of those runs that come to their end. Afterwards the notes of all parts make the values of the whole batch;
every rank logs and keeps these, in the same hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from typing_extensions import Self

from lightning_parallel.strategies.lightning_package import LightningModule
from lightning_parallel.strategies.logged.averages import WeightedUpdates, averages
from lightning_parallel.strategies.logged.kept.buffers import BufferName, KeptBuffers
from lightning_parallel.strategies.logged.kept.merged import Merging, Part
from lightning_parallel.strategies.logged.kept.values import Change, KeptValues, Path, keep, names_of
from lightning_parallel.strategies.logged.kinds import Kind
from lightning_parallel.strategies.logged.logged_value import LoggedValue, combined
from lightning_parallel.strategies.logged.logging import StepLog
from lightning_parallel.strategies.logged.metrics import BatchMetric, GroupsOfBatch, UndoableMetric
from lightning_parallel.strategies.logged.reductions import HOW, UNSEEN, SeenKind, name_of
from lightning_parallel.strategies.logged.sums import OfMean
from lightning_parallel.techniques.step import BatchRecords
from lightning_parallel.techniques.tools.means import WATCHING, Means, Scale, is_among, scaled
from lightning_parallel.techniques.tools.microbatches import Dims, samples_in
from lightning_parallel.values import map_leaves, tensors_of

T = TypeVar("T")
RETURNED: Path = ("what the step returns",)
GUESSED = (
    "combined from the parts of a batch as if counts were sums and other values means over samples; whether that is "
    "so could not be seen"
)
_Kinds = dict[Path, tuple[Kind | None, ...]]
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Notes:
    """What one batch logged, the values of the metrics that were called in it, and what it kept on the module."""

    logged: list[LoggedValue]
    metrics: dict[str, Any]
    kept: dict[Path, Change]
    rank: int
    targets: float | None = None


class PartsRun(BatchRecords, Generic[T]):
    """Runs the user's step on the parts of one batch.

    Args:
        step: the user's.
        module: whose step it is.
        log: what `self.log` of the module leads to.
        rank: this rank in its pipeline.
        dims: where samples are in the batch, see `ParallelPlan.batch_dims`.
    """

    def __init__(
        self,
        step: Callable[..., T],
        module: LightningModule,
        log: StepLog,
        rank: int,
        dims: Dims,
    ) -> None:
        self._step, self._dims = step, dims
        #: takes back what a call has changed, where calls leave no trace, as those of a probe
        self.after_silent_call: Callable[[], None] | None = None
        self._module, self._log, self._rank = module, log, rank
        self._noted: list[list[LoggedValue]] = []  # of each call
        self._means: list[Means | None] = []
        self._multiples: list[list[Tensor]] = []
        self._before, self._kept = KeptValues(module), list[tuple[dict[Path, Change], _Kinds]]()
        self._buffers = KeptBuffers(module)
        self._hook = module._current_fx_name or ""
        self._watch = log.kinds.watch(self._hook)
        if self._watch is not None:
            self._watch.take_as_same((*self._before.tensors(), *module.buffers()))
        self._returned: list[tuple[Kind | None, ...]] = []
        self._given: list[list[WeightedUpdates]] = []
        self._sizes: list[int] = []
        self._metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
        self._names = {id(metric): name for name, metric in self._metrics.items()}
        self._called: dict[str, BatchMetric] = {}
        self._groups: list[GroupsOfBatch] = []
        self.origin: int | None = None
        self._targets: float | None = None

    @property
    def batch_idx(self) -> int:
        """See `BatchRecords.batch_idx`."""
        return self._module.trainer.fit_loop.total_batch_idx

    def track_buffers(self, buffers: Sequence[str]) -> None:
        """See `BatchRecords.track_buffers`."""
        self._buffers = KeptBuffers(self._module, buffers)

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """Runs the step on one part; what it logged and counted stays if it comes to its end."""
        if self.after_silent_call is not None:
            return silently(self._step, self.after_silent_call, *args, **kwargs)
        noted: list[LoggedValue] = []
        size = samples_in(args[0], self._dims) or 1
        metrics = [UndoableMetric(metric) for metric in self._metrics.values()]
        kept, stay, watch = self._before, set[Path](), self._watch
        given = [WeightedUpdates(metric) for metric in self._metrics.values() if averages(metric)]
        lent = self._buffers.lend()
        if watch is not None:
            watch.samples = size
            watch.take_as_same(lent)
        try:
            with (
                watch or nullcontext(),
                self._log.diverted(
                    lambda name, value, options: noted.append(self._note(name, value, options, size, noted))
                ),
            ):
                output = self._step(*args, **kwargs)
                changes, stay = kept.changes()
                changes |= self._buffers.changes()
        except BaseException:
            for metric in metrics:
                metric.undo()
            raise
        else:
            self._log.tell(
                names_of(stay), "cannot be sent, so that what a step keeps there stays on the rank of the last stage"
            )
            self._noted.append(noted)
            self._means.append(WATCHING.get())
            made = [change.value for change in changes.values()]
            self._multiples.append(_multiples_in([output, made, [average.values for average in given]]))
            self._returned.append(self._kinds_of(RETURNED, Change(output)))
            self._kept.append((changes, {path: self._kinds_of(path, change) for path, change in changes.items()}))
            self._given.append(given)
            self._sizes.append(size)
        finally:
            kept.undo(stay)
            self._buffers.undo()
            for average in given:
                average.close()
            for metric in metrics:
                metric.close()
        return output

    @property
    def _is_doubtful(self) -> bool:
        return self._watch is not None and self._watch.doubtful

    def _kinds_of(self, path: Path, change: Change) -> tuple[Kind | None, ...]:
        leaves: list[Any] = []
        map_leaves(leaves.append, change.value)
        watch, before, seen = self._watch, change.before, None
        if watch is not None and isinstance(before, (int, float)) and isinstance(change.value, (int, float)):
            seen = [watch.kind_of_number(change.value, before)]
        elif watch is not None:
            seen = [watch.kind_of(leaf) for leaf in leaves]
        return self._log.kinds.of(self._hook, path, leaves, seen)

    def _note(
        self, name: str, value: Any, options: dict[str, Any], size: int, others: Sequence[LoggedValue]
    ) -> LoggedValue:
        if isinstance(value, Metric):
            return LoggedValue(name, self._names[id(value)], options, size)
        computed = [metric for metric, batch in self._called.items() if batch.value_of_batch is value]
        origin = value if isinstance(value, Tensor) else None
        path = ("logged", name)
        unseen = self._log.kinds.tells_nothing(self._hook, path, value, size)
        seen = None if self._watch is None or unseen else [self._watch.kind_of(value)]
        (kind,) = self._log.kinds.of(self._hook, path, [value], seen)
        if kind is None and origin is not None:
            kind = next((other.seen.kind for other in others if other.origin is origin), None)
        doubtful = self._is_doubtful
        seen_as = SeenKind.of(kind, value, size, name_of(options.get("reduce_fx", "mean")), doubtful)
        if doubtful and kind is Kind.SUM and seen_as.kind is Kind.OTHER:  # in batches that nobody watches, too
            self._log.kinds.decide(self._hook, path, (Kind.OTHER,))
        samples, metric = options.get("batch_size") or size, computed[0] if computed else None
        means = WATCHING.get()
        value, parts, function = self._log.multiples.counted(self._hook, name, value, means, self._watch)
        seen_as = SeenKind(Kind.MEAN, function=function) if function else seen_as
        of_means = (
            {}
            if means is None
            else {number: OfMean(parts[mean], mean.count) for number, mean in enumerate(means.all) if mean in parts}
        )
        kept = torch.as_tensor(value).detach().clone().reshape(())
        return LoggedValue(name, kept, options, samples, metric, origin, of_means, seen_as)

    def __enter__(self) -> Self:
        """Metrics that are called will tell their value for the whole batch in the end."""
        self._called = {name: BatchMetric(metric) for name, metric in self._metrics.items()}
        parts = self._module.modules()
        self._groups = [GroupsOfBatch(part) for part in parts if isinstance(part, MetricCollection)]
        return self

    def __exit__(self, *_: object) -> None:
        """After the last call."""
        for metric in self._called.values():
            metric.close()
        for groups in self._groups:
            groups.close()

    # ---------------------------------------------------------------- the whole batch

    def collect(
        self, shares: Sequence[float] = (), means: Sequence[Sequence[Tensor]] = (), targets: float | None = None
    ) -> Notes:
        """See `BatchRecords.collect`."""
        by_name: dict[tuple[str, bool], list[LoggedValue]] = {}
        for part, of_part, averaged in zip(self._noted, self._means, means, strict=True):
            for noted in (noted.counting(of_part, averaged) for noted in part):
                by_name.setdefault((noted.name, noted.options.get("add_dataloader_idx", True)), []).append(noted)
        self._count_by(shares, means)
        everything = [noted for part in self._noted for noted in part]
        asked = {noted.metric or noted.value for noted in everything if noted.metric or isinstance(noted.value, str)}
        values = {name: _on_device(self._called[name].value(), HOST) for name in sorted(map(str, asked))}
        logged = [combined(same, values, self._log.alone) for same in by_name.values()]
        unseen = [noted.name for noted in logged if noted.seen.kind not in HOW and noted.origin is not None]
        self._log.tell(unseen if len(self._sizes) > 1 else [], UNSEEN)
        logged = [replace(noted, origin=None) for noted in logged]
        return Notes(logged, values, self._merged(shares, means), self._rank, targets)

    def _merged(self, shares: Sequence[float], means: Sequence[Sequence[Tensor]]) -> dict[Path, Change]:
        parts = [
            Part(size, share, [*averaged, *multiples], *kept, self._is_doubtful)
            for size, share, averaged, multiples, kept in zip(
                self._sizes, shares, means, self._multiples, self._kept, strict=True
            )
        ]
        merging = Merging(parts, self._log.kinds.adding)
        merged = merging.merged()
        self._log.tell(names_of(merging.guessed), GUESSED)
        return merged

    def merge_outputs(
        self, outputs: Sequence[Any], sizes: Sequence[int], shares: Sequence[float], means: Sequence[Sequence[Tensor]]
    ) -> Any:
        """See `BatchRecords.merge_outputs`."""
        parts = [
            Part(size, share, [*averaged, *multiples], {RETURNED: Change(output)}, {RETURNED: kinds}, self._is_doubtful)
            for output, size, share, averaged, multiples, kinds in zip(
                outputs, sizes, shares, means, self._multiples, self._returned, strict=True
            )
        ]
        merging = Merging(parts, set())
        value = merging.value(RETURNED)
        self._log.tell([f"what {self._hook} returns" for _ in merging.guessed], GUESSED)
        return value

    def _count_by(self, shares: Sequence[float], means: Sequence[Sequence[Tensor]]) -> None:
        each = zip(self._sizes, shares, means, self._multiples, self._given, strict=True)
        for size, share, averaged, multiples, given in each if len(self._sizes) > 1 else ():
            for metric in given:
                metric.count_by(size / sum(self._sizes), share, partial(is_among, means=[*averaged, *multiples]))

    def replay(self, records: Notes) -> None:
        """See `BatchRecords.replay`."""
        notes = records
        self.origin, device = notes.rank, self._module.device
        self._targets = notes.targets
        of_buffers = {path: change for path, change in notes.kept.items() if isinstance(path[0], BufferName)}
        keep(self._module, {path: change for path, change in notes.kept.items() if path not in of_buffers})
        self._buffers.keep(of_buffers)
        for noted in notes.logged:
            value: Any = noted.value
            if isinstance(value, str):
                metric: Any = self._metrics[value]
                metric._forward_cache = _on_device(notes.metrics[value], metric.device)
                self._log(noted.name, metric, **noted.options)
            else:
                self._log.log_as(noted.seen, [*noted.of_means.values()], noted.name, value.to(device), noted.options)

    def scale_means(self, means: Means) -> None:
        """See `BatchRecords.scale_means`."""
        self._log.scale(means)

    def normalize_loss(self, loss: Tensor) -> Tensor:
        """See `BatchRecords.normalize_loss`."""
        if self._targets is None:
            return loss
        own = Scale.to_mean(self._targets, loss.device)  # until all ranks have told their targets
        return scaled(loss, own) if self._log.means is None else self._log.means.note(loss, self._targets, own)


class SeenRun(Generic[T]):
    """Runs the user's step, and sees its means, and of what kind the values are that it logs.

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
        means = self._log.means
        if means is None:
            return self._step(*args, **kwargs)
        means.batch = args[0] if args else None
        with self._log.watching(args[:1]), means:
            return self._step(*args, **kwargs)


def silently(step: Callable[..., T], restore: Callable[[], None], *args: Any, **kwargs: Any) -> T:
    """Calls the step without notes of it, and takes back what it has changed."""
    try:
        return step(*args, **kwargs)
    finally:
        restore()


def _multiples_in(value: Any) -> list[Tensor]:
    """The numbers in a value that are made of multiples of the step's means."""
    means = WATCHING.get()
    learning = [tensor for tensor in tensors_of(value) if not tensor.dim() and tensor.requires_grad]
    return [tensor.detach() for tensor in learning if means is not None and means.parts_of(tensor)]


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return {key: _on_device(part, device) for key, part in value.items()} if isinstance(value, dict) else value
