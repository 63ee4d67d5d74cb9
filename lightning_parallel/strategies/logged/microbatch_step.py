"""A user's step that runs on microbatches, perhaps on another rank: what it logs, counts and keeps, on every rank.

The step logs once for each microbatch. The values are combined as those of ranks (`sums`), and every rank logs the
values of the whole batch, in the same hook. Metrics are updated by each microbatch. What the step keeps in attributes
of the module is sent as it is, one entry per microbatch. All of that is the last stage's: only there, calls of the step
come to their end. Those that do not leave nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_parallel.collectives.made_of import version
from lightning_parallel.strategies.lightning_package import LightningModule
from lightning_parallel.strategies.logged.logging import StepLog, Term, from_sums, name_of, to_sums
from lightning_parallel.strategies.logged.metrics import everything
from lightning_parallel.strategies.traces import Attributes, Change
from lightning_parallel.techniques.step import BatchRecords
from lightning_parallel.techniques.tools.absent import Absent, refusal
from lightning_parallel.techniques.tools.means import WATCHING, Means, Scale, is_among, scaled
from lightning_parallel.techniques.tools.microbatches import Dims, samples_in
from lightning_parallel.techniques.tools.telling import warn
from lightning_parallel.values import add_note, map_tensors

T = TypeVar("T")
LOSS = -1
"""In place of the number of a mean: all targets by which the loss counts."""


class BatchBuffers:
    """Buffers of a module, of which all ranks have the same, in one batch: they change once for all microbatches.

    Each microbatch gets copies, so that all begin with what the batch found. Floating-point buffers then become the
    mean of what microbatches made of them, by samples; others, as counters, what the first one made of them.

    Args:
        module: the user's.
        names: their FQN.
    """

    def __init__(self, module: LightningModule, names: Sequence[str] = ()) -> None:
        split = {name: name.rpartition(".")[::2] for name in names}
        self._places = {name: (module.get_submodule(owner)._buffers, key) for name, (owner, key) in split.items()}
        self._owners = {name: owner for name, (owner, _) in split.items()}
        self._before: dict[str, Tensor] = {}
        self._made: list[dict[str, Tensor]] = []

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Inside, copies are in their places; what became of them is kept where no exception leaves this."""
        before = self._before = self._now()
        copies = {name: buffer.clone() for name, buffer in before.items()}
        versions = {name: version(copy) for name, copy in copies.items()}
        self._set(copies)
        try:
            yield
            now = self._now()
            kept = copies.keys() & now.keys()
            changed = {name for name in kept if now[name] is not copies[name] or version(now[name]) != versions[name]}
            # BatchNorm's kernels write its statistics without counting that as a version, but count batches beside them
            owners = {self._owners[name] for name in changed}
            beside = [name for name in kept if self._owners[name] in owners]
            changed |= {name for name in beside if not torch.equal(now[name], before[name])}
            self._made.append({name: buffer.detach() for name, buffer in now.items() if name in changed})
        finally:
            self._set(before)

    def _now(self) -> dict[str, Tensor]:
        found = {name: table.get(key) for name, (table, key) in self._places.items()}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def _set(self, buffers: Mapping[str, Tensor]) -> None:
        for name, buffer in buffers.items():
            table, key = self._places[name]
            table[key] = buffer

    def combined(self, sizes: Sequence[int]) -> dict[str, Tensor]:
        """The buffers that changed, on the host.

        Args:
            sizes: the samples of each microbatch that was kept.
        """
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for made in self._made for name in made):
            values = [made.get(name, self._before[name]) for made in self._made]
            found[name] = values[0].cpu()
            if len({value.shape for value in values}) == 1 < len(values) and values[0].is_floating_point():
                weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
                mean = torch.tensordot(weights, torch.stack([value.cpu().double() for value in values]), 1)
                found[name] = mean.to(values[0].dtype)
        return found

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Put values in the buffers, as `combined` returned them, perhaps on another rank."""
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
        name: under which it was logged.
        value: the number, or the FQN of a metric.
        origin: the tensor that was logged.
        options: of the call.
        samples: by which the value counts in a mean.
        parts: contributions of the step's means to it, by their numbers.
    """

    name: str
    value: Tensor | str
    origin: Any
    options: dict[str, Any]
    samples: float
    parts: dict[int, Tensor] = field(default_factory=dict)


class _Call(NamedTuple):
    """What a step logged for one microbatch of `size` samples, and the means that it computed."""

    size: int
    logged: list[_Logged]
    means: Means


class Records(NamedTuple):
    """What a step logged and kept for a batch, for all ranks.

    Attributes:
        logged: name, value, options, and contributions of means by their numbers.
        counts: over how much these means are.
        metrics: what metrics that were logged returned for the last microbatch.
        attributes: changes of the module's attributes.
        unsent: the names of attributes that changed otherwise.
        buffers: see `BatchBuffers.combined`.
        rank: of the last stage, in its pipeline.
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


class MicrobatchStep(BatchRecords, Generic[T]):
    """Runs the user's step on the microbatches of one batch.

    Args:
        step: the user's.
        module: whose step it is.
        log: what `self.log` of the module leads to.
        rank: this rank in its pipeline.
        dims: where samples are in the batch, see `ParallelPlan.batch_dims`.
    """

    def __init__(self, step: Callable[..., T], module: LightningModule, log: StepLog, rank: int, dims: Dims) -> None:
        self._step, self._module, self._log, self._rank, self._dims = step, module, log, rank, dims
        #: takes back what a call has changed, where calls leave no trace, as those of a probe
        self.after_silent_call: Callable[[], None] | None = None
        self._calls: list[_Call] = []
        self._size, self._noted = 1, list[_Logged]()
        self._before, self._buffers = Attributes(module), BatchBuffers(module)
        self._targets: float | None = None

    def track_buffers(self, buffers: Sequence[str]) -> None:
        """See `BatchRecords.track_buffers`."""
        self._buffers = BatchBuffers(self._module, buffers)

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """Run the step on one microbatch; what it logged, counted and kept stays if it comes to its end."""
        if self.after_silent_call is not None:
            try:
                return self._step(*args, **kwargs)
            finally:
                self.after_silent_call()
        self._size, self._noted = samples_in(args[0], self._dims) or 1, []
        attributes = Attributes(self._module)
        counted = [(metric, everything(metric)) for metric in self._log.metrics.all]
        self._log.divert = self._note
        try:
            with self._buffers.microbatch():
                output = self._step(*args, **kwargs)
        except BaseException as error:  # as the step of a stage that is not the last one raises
            for metric, states in counted:
                vars(metric).update(states)
            attributes.undo()
            if isinstance(error, Exception) and self._size == 1:
                add_note(
                    error,
                    "the step ran on a microbatch of 1 sample; where it, or a metric in it, needs more samples at "
                    "once, pass fewer microbatches: PipelineParallel(microbatches=2)",
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
        # a number of Python's has more digits than the dtype that it gets when it is logged
        kept = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        self._noted.append(_Logged(name, kept.reshape(()), value, options, self._size if size is None else size, parts))

    # ---------------------------------------------------------------- the whole batch

    def collect(self, means: Sequence[Sequence[Tensor]] = (), targets: float | None = None) -> Records:
        """See `BatchRecords.collect`."""
        # over how much each mean is, by microbatch; nothing where these computed other numbers of means
        counts, alike = list[dict[int, Tensor]](), len({len(call.means.all) for call in self._calls}) == 1
        for call in self._calls:
            every = dict(enumerate(mean.count for mean in call.means.all if alike))
            every |= {LOSS: call.means.count} if every and call.means.count is not None else {}
            counts.append({mean: count.detach().double().cpu() for mean, count in every.items()})
        in_all = sorted(set(counts[0]).intersection(*counts)) if counts else []
        by_name: dict[tuple[str, bool], list[tuple[int, _Logged]]] = {}
        for number, (call, averaged) in enumerate(zip(self._calls, means, strict=True)):
            given = [mean.given for mean in call.means.all]
            for each in call.logged:
                origin = each.origin
                if isinstance(origin, Tensor) and given and not is_among(origin, given) and is_among(origin, averaged):
                    # it counts as the loss does: as a whole, by all targets that its means are over
                    each.parts = {LOSS: torch.as_tensor(each.value)}
                key = each.name, each.options.get("add_dataloader_idx", True)
                by_name.setdefault(key, []).append((number, each))
        called = dict[str, Any]()
        logged = [_combined(same, counts, in_all, self._log.alone) for same in by_name.values()]
        totals = {mean: float(sum(each[mean] for each in counts)) for mean in in_all}
        metrics = {value for _, value, *_ in logged if isinstance(value, str)}
        for metric in self._log.metrics.all:
            if (name := self._log.metrics.names[id(metric)]) in metrics:
                called[name] = map_tensors(lambda tensor: tensor.detach().cpu(), metric._forward_cache)
        attributes, unsent = self._before.changes()
        packed = {name: change.packed() for name, change in attributes.items()}
        buffers = self._buffers.combined([call.size for call in self._calls])
        return Records(logged, totals, called, packed, unsent, buffers, self._rank, targets)

    def replay(self, records: Records) -> None:
        """See `BatchRecords.replay`."""
        log, module, device = self._log, self._module, self._module.device
        log.metrics.last_stage, self._targets = records.rank, records.targets
        self._buffers.put(records.buffers)
        # on the last stage the attributes are as the step left them
        if records.rank != self._rank:
            self._before.undo()
            for name, change in records.attributes.items():
                change.repeat(module, name, device)
        if new := [name for name in records.unsent if name not in log.warned_attributes]:
            log.warned_attributes.update(new)
            warn(
                f"{', '.join(f'self.{name}' for name in new)}: what a step of a pipeline changes there stays on the "
                "rank of the last stage, once for each microbatch. Only values that the step sets, and items that it "
                "appends to lists, are sent to other ranks. Use torchmetrics, or do it in on_train_batch_end(outputs, "
                "...), which every rank gets for the whole batch"
            )
        means = {}
        if log.means is not None:
            for number, count in sorted(records.counts.items()):
                log.means.note(torch.zeros((), device=device), count)
                means[number] = log.means.all[-1]
        metrics = {log.metrics.names[id(metric)]: metric for metric in log.metrics.all}
        for name, value, options, parts in records.logged:
            if isinstance(value, str):
                metric = metrics[value]
                metric._forward_cache = map_tensors(partial(Tensor.to, device=metric.device), records.metrics[value])
                log.record(name, metric, options, {})
            else:
                made = {means[number]: part.to(device) for number, part in parts.items() if number in means}
                log.record(name, value.to(device), options, made)

    def scale_means(self, means: Means) -> None:
        """See `BatchRecords.scale_means`."""
        self._log.scale(means)

    def normalize_loss(self, loss: Tensor) -> Tensor:
        """See `BatchRecords.normalize_loss`."""
        if self._targets is None:
            return loss
        own = Scale.to_mean(self._targets, loss.device)  # until all ranks have told their targets
        return scaled(loss, own) if self._log.means is None else self._log.means.note(loss, self._targets, own)


# ---------------------------------------------------------------- values of microbatches


def _combined(
    same: Sequence[tuple[int, _Logged]], counts: Sequence[dict[int, Tensor]], in_all: Sequence[int], alone: bool
) -> tuple[str, Any, dict[str, Any], dict[int, Tensor]]:
    """The value of the batch, of what was logged under one name for each microbatch, as ranks combine theirs.

    Args:
        same: what was logged, with the number of the microbatch.
        counts: over how much each mean is, by microbatch.
        in_all: the means that all microbatches have.
        alone: whether no other rank has samples of the batch: without any target a mean is nan then, as on one device.
    """
    first, options = same[0][1], dict(same[0][1].options)
    if options.get("batch_size") is not None:
        options["batch_size"] = int(sum(each.samples for _, each in same))
    if isinstance(first.value, str):
        return first.name, first.value, options, {}
    how = name_of(options.get("reduce_fx", "mean"))
    values = [torch.as_tensor(each.value).cpu() for _, each in same]
    absent = next((value for value in values if isinstance(value, Absent)), None)
    if absent is not None:
        raise refusal(absent.what)
    dtype = values[0].dtype if isinstance(first.origin, Tensor) else torch.get_default_dtype()
    values = [value.double() for value in values]
    reductions: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}
    if how in reductions:
        return first.name, reductions[how](torch.stack(values)).to(dtype), options, {}
    every = len(same) == len(counts) and all(each.parts.keys() == first.parts.keys() for _, each in same)
    means = [mean for mean in in_all if mean in first.parts] if every else []
    terms, sums = list[Term](), list[list[Tensor]]()
    for value, (number, each) in zip(values, same, strict=True):
        parts = {mean: each.parts[mean].detach().cpu() for mean in means}
        terms.append(Term("mean", value, each.samples, parts=parts))
        sums.append(to_sums(terms[-1:], {mean: counts[number][mean] for mean in means}))
    # microbatches are added up as ranks are, see `StepReduction`
    added = [torch.stack(numbers).sum() for numbers in zip(*sums, strict=True)]
    value, whole = next(from_sums(added, terms[:1], means, alone))
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    return first.name, value.to(dtype), options, {} if alone else whole
