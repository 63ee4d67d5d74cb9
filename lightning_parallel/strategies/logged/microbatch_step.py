"""Repeats on every rank of a pipeline what the user's step logged, counted and stored on the last stage.

Only on the last stage do calls of the step return; on other stages they are aborted and leave no side effects. The
step logs once per microbatch. These values are combined as those of ranks are (`to_sums`), and every rank logs the
values of the batch in the same hook. Metrics are updated by each microbatch. Changes of the module's attributes are
sent as they are: a list to which the step appends gets one entry per microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_parallel.collectives.derived_cache import version
from lightning_parallel.strategies.lightning_package import LightningModule
from lightning_parallel.strategies.logged.metrics import snapshot_metric
from lightning_parallel.strategies.logged.step_log import ObservedStep, StepLog, Term, from_sums, name_of, to_sums
from lightning_parallel.strategies.side_effects import Attributes, Change
from lightning_parallel.techniques.step import BatchRecords
from lightning_parallel.techniques.tools.absent import Absent, absent_error
from lightning_parallel.techniques.tools.means import WATCHING, Means, Scale, is_among, scaled
from lightning_parallel.techniques.tools.microbatches import Dims, samples_in
from lightning_parallel.techniques.tools.user_warnings import warn
from lightning_parallel.values import add_note, map_tensors

T = TypeVar("T")
LOSS = -1
"""Key in place of the number of a mean: the loss as a whole, which counts by the targets of all its means."""


class BatchBuffers:
    """Replicated buffers of a module in one batch: they change once for all microbatches.

    Each microbatch gets copies, so that all start from the values before the batch. A floating-point buffer then
    becomes the mean of its copies over microbatches, by samples; others, e.g. counters, become the first one's copy.

    Args:
        module: the user's.
        names: FQNs of the buffers.
    """

    def __init__(self, module: LightningModule, names: Sequence[str] = ()) -> None:
        split = {name: name.rpartition(".")[::2] for name in names}
        self._places = {name: (module.get_submodule(owner)._buffers, key) for name, (owner, key) in split.items()}
        self._owners = {name: owner for name, (owner, _) in split.items()}
        self._before: dict[str, Tensor] = {}
        self._made: list[dict[str, Tensor]] = []

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Inside, the module has copies of the buffers; changed copies are stored unless an exception is raised."""
        before = self._before = self._now()
        copies = {name: buffer.clone() for name, buffer in before.items()}
        versions = {name: version(copy) for name, copy in copies.items()}
        self._set(copies)
        try:
            yield
            now = self._now()
            both = copies.keys() & now.keys()
            changed = {name for name in both if now[name] is not copies[name] or version(now[name]) != versions[name]}
            # BatchNorm's kernels write its statistics without a new version, but `num_batches_tracked` gets one: where
            # a buffer of a module changed, the values of its other buffers are compared
            owners = {self._owners[name] for name in changed}
            candidates = [name for name in both if self._owners[name] in owners]
            changed |= {name for name in candidates if not torch.equal(now[name], before[name])}
            self._made.append({name: buffer.detach() for name, buffer in now.items() if name in changed})
        finally:
            self._set(before)

    def _now(self) -> dict[str, Tensor]:
        buffers = {name: table.get(key) for name, (table, key) in self._places.items()}
        return {name: buffer for name, buffer in buffers.items() if buffer is not None}

    def _set(self, buffers: Mapping[str, Tensor]) -> None:
        for name, buffer in buffers.items():
            table, key = self._places[name]
            table[key] = buffer

    def combined(self, sizes: Sequence[int]) -> dict[str, Tensor]:
        """Return the new values of the buffers that changed, on the host.

        Args:
            sizes: the number of samples of each microbatch whose call returned.
        """
        result: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for copies in self._made for name in copies):
            values = [copies.get(name, self._before[name]) for copies in self._made]
            result[name] = values[0].cpu()
            if len({value.shape for value in values}) == 1 < len(values) and values[0].is_floating_point():
                weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
                mean = torch.tensordot(weights, torch.stack([value.cpu().double() for value in values]), 1)
                result[name] = mean.to(values[0].dtype)
        return result

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Set the buffers to values that `combined` returned, perhaps on another rank."""
        for name, value in values.items():
            table, key = self._places[name]
            before = table.get(key)
            if before is not None and before.shape == value.shape and before.dtype == value.dtype:
                with torch.no_grad():
                    before.copy_(value)
            else:
                table[key] = value if before is None else value.to(before.device)


@dataclass
class _Logged:
    """One call of `self.log` for a microbatch.

    Attributes:
        name: under which the value was logged.
        value: a copy of the number, or the FQN of a metric.
        origin: the object that was logged.
        options: of the call.
        samples: weight of the value in a mean.
        parts: number of a mean of the step -> what it contributes to the value.
    """

    name: str
    value: Tensor | str
    origin: Any
    options: dict[str, Any]
    samples: float
    parts: dict[int, Tensor] = field(default_factory=dict)


class _Call(NamedTuple):
    """Values that the step logged for one microbatch of `size` samples, and the means that it computed."""

    size: int
    logged: list[_Logged]
    means: Means


class Records(NamedTuple):
    """Side effects of the step on a batch, sent from the last stage to all ranks of the pipeline.

    Attributes:
        logged: name, value of the batch, options, and what each mean, by its number, contributes to the value.
        counts: number of a mean -> its targets in the batch.
        metrics: FQN of a logged metric -> its value for the last microbatch.
        attributes: changes of the module's attributes.
        unsent: names of attributes that changed in a way that cannot be sent.
        buffers: see `BatchBuffers.combined`.
        rank: rank of the last stage in its pipeline.
        targets: see `BatchRecords.collect`.
    """

    logged: list[tuple[str, Any, dict[str, Any], dict[int, Tensor]]]
    counts: dict[int, float]
    metrics: dict[str, Any]
    attributes: dict[str, Change]
    unsent: list[str]
    buffers: dict[str, Tensor]
    rank: int
    targets: float | None


class MicrobatchStep(ObservedStep[T], BatchRecords):
    """The user's step on the microbatches of one batch; records its side effects.

    Args:
        step: the user's.
        module: the step's module.
        log: replaces `self.log` of the module.
        rank: this rank in its pipeline.
        dims: the batch dimensions of the batch's tensors, see `ParallelPlan.batch_dims`.
    """

    def __init__(self, step: Callable[..., T], module: LightningModule, log: StepLog, rank: int, dims: Dims) -> None:
        super().__init__(step, log)
        self._module, self._rank, self._dims = module, rank, dims
        self._calls: list[_Call] = []
        self._size, self._noted = 1, list[_Logged]()
        self._before, self._buffers = Attributes(module), BatchBuffers(module)
        self._targets: float | None = None

    def track_buffers(self, buffers: Sequence[str]) -> None:
        """See `BatchRecords.track_buffers`."""
        self._buffers = BatchBuffers(self._module, buffers)

    def recorded(self, *args: Any, **kwargs: Any) -> T:
        """Run the step on one microbatch, and record its side effects; undo them if it raises."""
        self._size, self._noted = samples_in(args[0], self._dims) or 1, []
        attributes = Attributes(self._module)
        snapshots = [(metric, snapshot_metric(metric)) for metric in self._log.metrics.all]
        self._log.divert = self._note
        try:
            with self._buffers.microbatch():
                output = self._step(*args, **kwargs)
        except BaseException as error:  # such as that which aborts the step on stages before the last
            for metric, states in snapshots:
                vars(metric).update(states)
            attributes.undo()
            if isinstance(error, Exception) and self._size == 1:
                add_note(
                    error,
                    "the step ran on a microbatch of 1 sample; if it, or a metric in it, needs more samples, use fewer "
                    "microbatches: PipelineParallel(microbatches=2)",
                )
            raise
        finally:
            self._log.divert = None
        self._calls.append(_Call(self._size, self._noted, WATCHING.get() or Means()))
        return output

    def _note(self, name: str, value: Any, options: dict[str, Any]) -> None:
        if isinstance(value, Metric):
            self._noted.append(_Logged(name, self._log.metrics.names[id(value)], None, options, self._size))
            return
        size, means = options.get("batch_size"), WATCHING.get()
        parts: dict[int, Tensor] = {}
        if isinstance(value, Tensor) and means is not None:
            found = means.parts_of(value)
            parts = {number: found[mean].detach().clone() for number, mean in enumerate(means.all) if mean in found}
        # a Python float has more digits than the dtype that it gets when it is logged
        copy = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        self._noted.append(_Logged(name, copy.reshape(()), value, options, self._size if size is None else size, parts))

    # ---------------------------------------------------------------- side effects on the batch

    def collect(self, means: Sequence[Sequence[Tensor]] = (), targets: float | None = None) -> Records:
        """See `BatchRecords.collect`."""
        # per microbatch: number of a mean -> its targets; empty if microbatches computed different numbers of means
        counts, equally_many = list[dict[int, Tensor]](), len({len(call.means.all) for call in self._calls}) == 1
        for call in self._calls:
            targets_of = dict(enumerate(mean.count for mean in call.means.all if equally_many))
            targets_of |= {LOSS: call.means.count} if targets_of and call.means.count is not None else {}
            counts.append({mean: count.detach().double().cpu() for mean, count in targets_of.items()})
        in_all = sorted(set(counts[0]).intersection(*counts)) if counts else []
        by_name: dict[tuple[str, bool], list[tuple[int, _Logged]]] = {}
        for number, (call, averaged) in enumerate(zip(self._calls, means, strict=True)):
            known = [mean.given for mean in call.means.all]
            for entry in call.logged:
                origin = entry.origin
                if isinstance(origin, Tensor) and known and not is_among(origin, known) and is_among(origin, averaged):
                    # it counts as the step's loss: as a whole, by the targets of all its means
                    entry.parts = {LOSS: torch.as_tensor(entry.value)}
                key = entry.name, entry.options.get("add_dataloader_idx", True)
                by_name.setdefault(key, []).append((number, entry))
        logged = [_combined(same, counts, in_all, self._log.alone) for same in by_name.values()]
        totals = {mean: float(sum(of_microbatch[mean] for of_microbatch in counts)) for mean in in_all}
        metrics: dict[str, Any] = {}
        for name in (value for _, value, *_ in logged if isinstance(value, str)):
            metric: Any = self._module.get_submodule(name)
            metrics[name] = map_tensors(lambda tensor: tensor.detach().cpu(), metric._forward_cache)
        attributes, unsent = self._before.changes()
        packed = {name: change.packed() for name, change in attributes.items()}
        buffers = self._buffers.combined([call.size for call in self._calls])
        return Records(logged, totals, metrics, packed, unsent, buffers, self._rank, targets)

    def replay(self, records: Records) -> None:
        """See `BatchRecords.replay`."""
        log, module, device = self._log, self._module, self._module.device
        log.metrics.last_stage, self._targets = records.rank, records.targets
        self._buffers.put(records.buffers)
        # on the last stage the step itself has changed the attributes
        if records.rank != self._rank:
            self._before.undo()
            for name, change in records.attributes.items():
                change.repeat(module, name, device)
        if new := [name for name in records.unsent if name not in log.warned_attributes]:
            log.warned_attributes.update(new)
            warn(
                f"{', '.join(f'self.{name}' for name in new)}: a step of a pipeline changed this on the rank of the "
                "last stage only, once per microbatch. Other ranks get only the values that a step sets and the items "
                "that it appends to lists. Use torchmetrics, or make the change in on_train_batch_end(outputs, ...), "
                "which every rank runs for the whole batch"
            )
        means = {}
        if log.means is not None:
            for number, count in sorted(records.counts.items()):
                log.means.note(torch.zeros((), device=device), count)
                means[number] = log.means.all[-1]
        for name, value, options, parts in records.logged:
            if isinstance(value, str):
                metric: Any = module.get_submodule(value)
                metric._forward_cache = map_tensors(partial(Tensor.to, device=metric.device), records.metrics[value])
                log.record(name, metric, options, {})
            else:
                contributions = {means[number]: part.to(device) for number, part in parts.items() if number in means}
                log.record(name, value.to(device), options, contributions)

    def scale_means(self, means: Means) -> None:
        """See `BatchRecords.scale_means`."""
        self._log.scale(means)

    def normalize_loss(self, loss: Tensor) -> Tensor:
        """See `BatchRecords.normalize_loss`."""
        if self._targets is None:
            return loss
        # from a sum to a mean over this rank's targets; `StepReduction` sets the factor for those of all ranks
        factor = 1 / self._targets if self._targets else 0.0
        scale = Scale(torch.tensor(factor, dtype=torch.float64, device=loss.device))
        return scaled(loss, scale) if self._log.means is None else self._log.means.note(loss, self._targets, scale)


# ---------------------------------------------------------------- values of microbatches


def _combined(
    same: Sequence[tuple[int, _Logged]], counts: Sequence[dict[int, Tensor]], in_all: Sequence[int], alone: bool
) -> tuple[str, Any, dict[str, Any], dict[int, Tensor]]:
    """Combine the values that microbatches logged under one name into that of the batch, as ranks combine theirs.

    Args:
        same: microbatch number and logged value.
        counts: per microbatch: number of a mean -> its targets.
        in_all: numbers of the means that all microbatches have.
        alone: whether no other rank has samples of the batch; a mean without any target is nan then, as on one device.

    Returns:
        An entry of `Records.logged`.
    """
    first, options = same[0][1], dict(same[0][1].options)
    if options.get("batch_size") is not None:
        options["batch_size"] = int(sum(entry.samples for _, entry in same))
    if isinstance(first.value, str):
        return first.name, first.value, options, {}
    how = name_of(options.get("reduce_fx", "mean"))
    values = [torch.as_tensor(entry.value).cpu() for _, entry in same]
    absent = next((value for value in values if isinstance(value, Absent)), None)
    if absent is not None:
        raise absent_error(absent.what)
    dtype = values[0].dtype if isinstance(first.origin, Tensor) else torch.get_default_dtype()
    values = [value.double() for value in values]
    reductions: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}
    if how in reductions:
        return first.name, reductions[how](torch.stack(values)).to(dtype), options, {}
    by_targets = len(same) == len(counts) and all(entry.parts.keys() == first.parts.keys() for _, entry in same)
    means = [mean for mean in in_all if mean in first.parts] if by_targets else []
    terms, sums = list[Term](), list[list[Tensor]]()
    for value, (number, entry) in zip(values, same, strict=True):
        parts = {mean: entry.parts[mean].detach().cpu() for mean in means}
        terms.append(Term("mean", value, entry.samples, parts=parts))
        sums.append(to_sums(terms[-1:], {mean: counts[number][mean] for mean in means}))
    # summed over microbatches as `StepReduction` sums over ranks
    totals = [torch.stack(numbers).sum() for numbers in zip(*sums, strict=True)]
    value, contributions = next(from_sums(totals, terms[:1], means, alone))
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    return first.name, value.to(dtype), options, {} if alone else contributions
