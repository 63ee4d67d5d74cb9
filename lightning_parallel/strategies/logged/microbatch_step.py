"""A user's step that runs on microbatches, perhaps on another rank: what it logs, counts and keeps, on every rank.

The step logs once for each microbatch. The values are combined as those of ranks (`logging`), and every rank logs the
values of the whole batch, in the same hook. Metrics are updated by each microbatch. What the step keeps in attributes
of the module is sent as it is, one entry per microbatch. All of that is the last stage's: only there, calls of the step
come to their end. Those that do not leave nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_parallel.strategies.attributes import Attributes, Change
from lightning_parallel.strategies.lightning_package import LightningModule
from lightning_parallel.strategies.logged.buffers import BatchBuffers
from lightning_parallel.strategies.logged.logging import StepLog, silently
from lightning_parallel.strategies.logged.step_values import name_of
from lightning_parallel.techniques.step import BatchRecords
from lightning_parallel.techniques.tools.absent import Absent, refusal
from lightning_parallel.techniques.tools.means import WATCHING, Means, Scale, is_among, scaled
from lightning_parallel.techniques.tools.microbatches import Dims, samples_in
from lightning_parallel.techniques.tools.telling import warn
from lightning_parallel.values import map_tensors

T = TypeVar("T")
LOSS = -1
"""In place of the number of a mean: all targets by which the loss counts."""


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
        """Runs the step on one microbatch; what it logged, counted and kept stays if it comes to its end."""
        if self.after_silent_call is not None:
            return silently(self._step, self.after_silent_call, *args, **kwargs)
        self._size, self._noted = samples_in(args[0], self._dims) or 1, []
        attributes = Attributes(self._module)
        self._buffers.lend()
        self._log.divert = self._note
        try:
            with self._log.metrics.undone_unless_completed():
                output = self._step(*args, **kwargs)
        except BaseException as error:
            attributes.undo()
            if isinstance(error, Exception) and self._size == 1:
                error.add_note(
                    "the step ran on a microbatch of 1 sample; where it, or a metric in it, needs more samples at "
                    "once, pass fewer microbatches: PipelineParallel(microbatches=2)"
                )
            raise
        else:
            self._buffers.keep()
            means = WATCHING.get()
            self._calls.append(_Call(self._size, self._noted, Means() if means is None else means))
        finally:
            self._log.divert = None
            self._buffers.undo()
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
        by_name: dict[tuple[str, bool], list[_Logged]] = {}
        counts = _counts(self._calls)
        for call, averaged in zip(self._calls, means, strict=True):
            for each in call.logged:
                if _is_loss(each, call.means, averaged):
                    each.parts = {LOSS: torch.as_tensor(each.value)}
                by_name.setdefault((each.name, each.options.get("add_dataloader_idx", True)), []).append(each)
        logged, called = [_combined(same, counts, self._log.alone) for same in by_name.values()], dict[str, Any]()
        totals = {number: float(sum(each)) for number, each in counts.items()}
        every = {value for _, value, *_ in logged if isinstance(value, str)}
        for metric in self._log.metrics.all:
            if (name := self._log.metrics.names[id(metric)]) in every:
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
        if records.rank != self._rank:
            self._before.undo()
            for name, change in records.attributes.items():
                change.repeat(module, name, device)
        self._warn_of(records.unsent)
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

    def _warn_of(self, names: Sequence[str]) -> None:
        told = self._log.told_attributes
        if new := [name for name in names if name not in told]:
            told.update(new)
            warn(
                f"{', '.join(f'self.{name}' for name in new)}: what a step of a pipeline changes there stays on the "
                "rank of the last stage, once for each microbatch. Only values that the step sets, and items that it "
                "appends to lists, are sent to other ranks. Use torchmetrics, or do it in on_train_batch_end(outputs, "
                "...), which every rank gets for the whole batch"
            )

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


def _is_loss(logged: _Logged, means: Means, averaged: Sequence[Tensor]) -> bool:
    """Whether what was logged counts as the loss does: as a whole, by all targets that its means are over."""
    value = logged.origin
    if not isinstance(value, Tensor) or not means.all or is_among(value, [mean.given for mean in means.all]):
        return False
    return is_among(value, averaged)


def _counts(calls: Sequence[_Call]) -> dict[int, list[float]]:
    """Over how much each mean is, in each microbatch; none where these computed other numbers of means."""
    if not calls or len({len(call.means.all) for call in calls}) > 1 or not calls[0].means.all:
        return {}
    loss = [call.means.count for call in calls]
    counts = {
        number: [float(call.means.all[number].count) for call in calls] for number in range(len(calls[0].means.all))
    }
    return {LOSS: [float(count) for count in loss if count is not None], **counts}


def _combined(
    same: Sequence[_Logged], counts: Mapping[int, Sequence[float]], alone: bool
) -> tuple[str, Any, dict[str, Any], dict[int, Tensor]]:
    """The value of the batch, of what was logged under one name for each microbatch.

    Value v_i of microbatch i is a sum of contributions part_ki of means over c_ki targets, and of a rest that counts by
    n_i samples. Of the batch that makes

        value = sum_i n_i rest_i / sum_i n_i + sum_k (sum_i c_ki part_ki) / (sum_i c_ki)

    Args:
        same: what was logged.
        counts: c_ki.
        alone: whether no other rank has samples of the batch: without any target a mean is nan then, as on one device.
    """
    first, options = same[0], dict(same[0].options)
    if options.get("batch_size") is not None:
        options["batch_size"] = int(sum(each.samples for each in same))
    if isinstance(first.value, str):
        return first.name, first.value, options, {}
    how = name_of(options.get("reduce_fx", "mean"))
    given = [torch.as_tensor(each.value).cpu() for each in same]
    if absent := next((value for value in given if isinstance(value, Absent)), None):
        raise refusal(absent.what)
    dtype = given[0].dtype if isinstance(first.origin, Tensor) else torch.get_default_dtype()
    values, whole = torch.stack([value.double() for value in given]), dict[int, Tensor]()
    if how in ("sum", "min", "max"):
        value = values.sum() if how == "sum" else values.amin() if how == "min" else values.amax()
        return first.name, value.to(dtype), options, whole
    numbers = set(first.parts) if all(each.parts.keys() == first.parts.keys() for each in same) else set()
    for number in sorted(number for number in numbers if len(counts.get(number, ())) == len(same)):
        parts = torch.stack([each.parts[number].detach().double().cpu() for each in same])
        values, targets = values - parts, torch.tensor(counts[number], dtype=torch.float64)
        total = (parts * targets).sum()
        whole[number] = total / targets.sum() if alone or targets.sum() else total
    sizes = torch.tensor([each.samples for each in same], dtype=torch.float64)
    value = (values * sizes).sum() / sizes.sum() + sum(whole.values())
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    return first.name, value.to(dtype), options, {} if alone else whole
