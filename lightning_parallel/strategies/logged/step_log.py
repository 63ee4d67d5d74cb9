"""`self.log` behaves as with `sync_dist=True`: all ranks get the values of the global batch.

`reduce_fx` combines the values of ranks. A mean is weighted by `batch_size`, by default the rank's number of samples; a
mean loss of torch, or one by `lightning_parallel.mean`, by its targets. Lightning reduces epoch values when it computes
them. Step values are reduced together, by one all-reduce of sums and one of extremes, while backward runs. Before that,
ranks compare which names they logged: a reduction of values that only some ranks log would never end.

The value v_r of a mean on rank (or microbatch) r is a sum: part_kr is contributed by loss k, a mean over c_kr targets
(`Mean`), and the rest counts by samples: v_r = rest_r + sum_k part_kr. The rank weighs w_r: its number of samples,
divided by the average of all R ranks. The value of the global batch is

    value = sum_r w_r rest_r / sum_r w_r + sum_k (sum_r c_kr part_kr) / (sum_r c_kr)

Its gradient is the mean over ranks of the gradients of w_r v_r, if rank r multiplies the gradient of loss k by

    scale_kr = c_kr R / sum_r c_kr / w_r
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_parallel.collectives.functional import Pending, packed, to_group_device
from lightning_parallel.strategies.data.batches import Batches, Exchange, Message, SyncPoint, Words
from lightning_parallel.strategies.lightning_package import LightningModule, _Metadata, _ResultMetric, is_overridden
from lightning_parallel.strategies.logged.metrics import ModuleMetrics
from lightning_parallel.techniques.step import BatchContext
from lightning_parallel.techniques.tools.means import Mean, Means

log = logging.getLogger(__name__)

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

SIGNS = {"max": 1.0, "min": -1.0}
"""Signs by which extremes are multiplied: a minimum is reduced as the maximum of the negated values."""
NEUTRAL = {"sum": 0.0, "min": float("inf"), "max": float("-inf")}
"""What a batch of weight 0 contributes to a reduction; to a mean it contributes any value with weight 0."""
OPTIONS = (*signature(LightningModule.log).parameters,)[3:]
"""Names of the parameters of `self.log` after the name and the value, in their order."""


# ---------------------------------------------------------------- values of ranks, or of microbatches


class Term(NamedTuple):
    """Contribution of one rank or one microbatch to a logged value.

    Attributes:
        how: the reduction: mean, sum, min or max.
        value: scalar.
        weight: for a mean: its number of samples, absolute or relative to the average rank.
        parts: for a mean: `part_kr` of each loss k that the step computed (see the module).
    """

    how: str
    value: Tensor
    weight: float = 1.0
    parts: Mapping[Any, Tensor] = {}


def to_sums(terms: Sequence[Term], counts: Mapping[K, Tensor]) -> list[Tensor]:
    """Return the scalars that are to be summed over ranks to reduce means and sums; `from_sums` decodes the result.

    Args:
        terms: means and sums of this rank.
        counts: the number of targets of each loss.
    """
    numbers: list[Tensor] = []
    for how, value, weight, parts in terms:
        rest = value.detach().double().reshape(())
        if how == "sum":
            numbers.append(rest)
            continue
        for mean, count in counts.items():
            part = parts[mean].detach().double() if mean in parts else torch.zeros_like(rest)
            numbers.append(part * count)
            rest = rest - part
        numbers += [rest * weight, torch.full_like(rest, weight)]
    return [*numbers, *counts.values()]


def from_sums(
    numbers: Sequence[Tensor], terms: Sequence[Term], means: Sequence[K], alone: bool = True
) -> Iterator[tuple[Tensor, dict[K, Tensor]]]:
    """Yield for each term the value of the global batch, and what each loss contributes to that value.

    Args:
        numbers: results of `to_sums`, summed over ranks.
        terms: as given to `to_sums`.
        means: the keys of its `counts`.
        alone: if True, a mean over no targets at all is nan, as on one device; otherwise it is 0.
    """
    totals, remaining = numbers[len(numbers) - len(means) :], iter(numbers)
    for how, _, _, parts in terms:
        if how == "sum":
            yield next(remaining), {}
            continue
        contributions: dict[K, Tensor] = {}
        for mean, total in zip(means, totals, strict=True):
            part = next(remaining) / total
            contributions[mean] = part if alone and mean in parts else torch.where(total == 0, 0.0, part)
        yield sum(contributions.values(), start=next(remaining) / next(remaining)), contributions


class StepReduction:
    """Reduces values over ranks. Making one starts an all-reduce of sums and one of extremes; `values` waits for them.

    Collective over `group`: all ranks need the same number of terms and means, of the same kinds, in the same order.

    Args:
        terms: this rank's contributions to the values.
        means: of the step.
        weight: of this rank's samples, 1 on average over ranks; with 0 the rank contributes nothing.
        group: the ranks that read different samples.
    """

    def __init__(self, terms: Sequence[Term], means: Sequence[Mean], weight: float, group: dist.ProcessGroup) -> None:
        self._terms, self._weight, self._ranks = terms, weight, group.size()
        # mean -> scalar: its targets on this rank
        self._counts = dict[Mean, Tensor]()
        for mean in means:
            self._counts[mean] = mean.count if weight else torch.zeros_like(mean.count)
        self._added, extremes = list[Term](), list[Tensor]()
        for term in terms:
            if term.how in SIGNS:
                extremes.append(SIGNS[term.how] * term.value.detach().double().reshape(()))
            else:
                self._added.append(term)
        self._values: list[Tensor] | None = None
        self._sent = list[tuple[Tensor, Pending]]()
        # each is one message, [numbers], in double precision; backward runs while it is in flight
        for numbers, operation in ((to_sums(self._added, self._counts), "SUM"), (extremes, "MAX")):
            if numbers:
                message: Any = packed(numbers, group)
                work = dist.all_reduce(message, getattr(dist.ReduceOp, operation), group=group, async_op=True)
                self._sent.append((message, Pending(work)))

    def values(self) -> list[Tensor]:
        """Wait, set the gradient scale of each mean, and return the values of the global batch, in the terms' order."""
        if self._values is not None:
            return self._values
        self._values, numbers = [], list[Tensor]()
        for message, work in self._sent:
            work.wait()
            numbers += message.unbind()
        # [sums, target counts of means, extremes]
        end = len(numbers) - (len(self._terms) - len(self._added))
        reduced, maxima = from_sums(numbers[:end], self._added, [*self._counts]), iter(numbers[end:])
        for term in self._terms:
            self._values.append(SIGNS[term.how] * next(maxima) if term.how in SIGNS else next(reduced)[0])
        for (mean, count), total in zip(self._counts.items(), numbers[end - len(self._counts) : end], strict=True):
            mean.scale.factor = _scale(count, total.to(count.device), self._ranks, self._weight)
            mean.total.factor = torch.where(total == 0, 0.0, self._ranks / total).to(count.device)
        return self._values


def _scale(own: Tensor, total: Tensor, ranks: int, weight: float) -> Tensor:
    """Return `scale_kr` (see the module): 0 on a rank of weight 0, and where no rank has a target."""
    scale = own * (ranks / weight) / total if weight else torch.zeros_like(own)
    return torch.where(total == 0, 0.0, scale)


def weighted_loss_value(loss: Tensor, means: Means) -> Tensor:
    """Return the value of a loss with each mean in it multiplied by the scale that its gradient gets."""
    counted = loss.detach()
    for mean, part in means.parts_of(loss).items():
        factor = mean.scale.factor
        counted = counted if factor is None else counted + part * (factor - 1).to(part)
    return counted


# ---------------------------------------------------------------- values that a step logs


@dataclass(frozen=True)
class StepValue:
    """Value that a step logged under one name.

    Attributes:
        result: Lightning's private result of the name.
        value: a copy: the step may change the tensor later, and memory that ZeRO 3 gathered is freed after the step.
        how: the reduction: mean, sum, min or max.
        batch_size: as the user passed it; None for the samples of the batch.
        samples: the weight with which Lightning has counted the value in the mean of the epoch.
        parts: what each loss of the step contributes to the value.
    """

    result: _ResultMetric
    value: Any
    how: str
    batch_size: float | None
    samples: float
    parts: Mapping[Mean, Tensor]

    @property
    def is_shown(self) -> bool:
        """Whether loggers get the value of each step."""
        return bool(self.result.meta.on_step and self.result._forward_cache is not None)

    def term(self, weight: float) -> Term:
        """Return this rank's contribution; `weight` is that of its samples, 1 on average over ranks."""
        # a Python float has more digits than the default dtype, which it would get here
        value = torch.as_tensor(self.value, dtype=torch.float64 if isinstance(self.value, float) else None)
        if self.how != "mean":
            return Term(self.how, value if weight else torch.full_like(value, NEUTRAL[self.how], dtype=torch.float64))
        term_weight = weight if self.batch_size is None or not weight else self.batch_size
        return Term("mean", value, term_weight, self.parts)

    def place(self, value: Tensor, by_targets: bool) -> None:
        """Replace this rank's value in Lightning's result by that of the global batch.

        The sum from which the epoch's value is computed is corrected too if means counted `by_targets`.
        """
        result, meta = self.result, self.result.meta
        if self.is_shown:
            assert result._forward_cache is not None
            result._forward_cache = value.to(result._forward_cache)
            if not meta.on_epoch:
                result.value = result._forward_cache
        if by_targets and self.how == "mean" and meta.on_epoch and self.samples:
            assert isinstance(result.value, Tensor)
            logged = torch.as_tensor(self.value).to(result.value).reshape(())
            result.value = result.value + (value.to(logged) - logged) * self.samples


def name_of(reduction: Any) -> str:
    """Return the name of a `reduce_fx`, in lower case."""
    return (reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "mean")).lower()


class StepLog:
    """Replaces `log` of a module during a run, so that values are reduced over the ranks that read different samples.

    Args:
        module: the user's.
        group: the ranks that read different samples.
        host: all ranks; the group sends from host memory.
        batches: has the weight of the current batch.
        pipelined: whether steps run on microbatches.
        back: restores the module's `log` and the process groups of its metrics when it is closed.

    Attributes:
        alone: whether all ranks read the same samples.
        defers: whether `Strategy.reduce` must return its input now, because this class reduces step values itself.
        counts_by_samples: whether losses of training are weighted by samples even where their targets are known.
        means: losses of the step that runs or ran last; None if all ranks read the same samples.
        divert: if set, gets the name, value and options of each `log` call: the step runs on a microbatch.
        warned_attributes: attributes of the module about which a warning said that other ranks do not get them.
    """

    def __init__(
        self,
        module: LightningModule,
        group: dist.ProcessGroup,
        host: dist.ProcessGroup,
        batches: Batches,
        pipelined: bool,
        back: ExitStack,
    ) -> None:
        self._module, self._batches = module, batches
        self._group, self._host, self._ranks = group, host, group.size()
        self.alone = self._ranks == 1
        self.defers = self.counts_by_samples = False
        self._logged: dict[str, StepValue] = {}
        #: pending reduction of the last step, the values in it, and whether means in them count by targets
        self._reduction: StepReduction | None = None
        self._reduced: list[StepValue] = []
        self._by_targets = False
        self.means: Means | None = None
        self._differed = False
        self._counted: tuple[Tensor, Tensor] | None = None
        self.divert: Callable[[str, Any, dict[str, Any]], None] | None = None
        self.warned_attributes: set[str] = set()
        self._may_leave = is_overridden("on_train_batch_start", module)  # by returning -1
        self._log = module.log
        self.metrics = ModuleMetrics(module, group, pipelined, back)
        module.__dict__["log"] = self
        back.callback(module.__dict__.pop, "log", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Let copies of the module, which callbacks make to average its weights, log nothing."""
        return _log_nothing

    # ---------------------------------------------------------------- what the user calls

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log as `LightningModule.log` with `sync_dist=True`, except that `reduce_step` reduces step values."""
        options = {**dict(zip(OPTIONS, args, strict=False)), **kwargs, "sync_dist": True}
        value = value.full_tensor() if isinstance(value, DTensor) else value
        value = self.metrics.of_all_ranks(value) if self.metrics.losses else value
        if self.divert is not None:
            if "reduce_fx" in options:  # raises Lightning's own error where it has no such reduction
                _Metadata("training_step", name, reduce_fx=options["reduce_fx"])
            return self.divert(name, value, options)
        parts = dict[Mean, Tensor]()
        if self.metrics.in_step and self.means is not None and isinstance(value, Tensor):
            for mean, part in self.means.parts_of(value).items():
                parts[mean] = part.detach().clone()  # the step may change them in place
        return self.record(name, value, options, parts)

    def record(self, name: str, value: Any, options: dict[str, Any], parts: Mapping[Mean, Tensor]) -> None:
        """Let Lightning log a value; store it for `reduce_step`, or reduce it immediately outside of a step.

        Args:
            name: under which it is logged.
            value: a number or a metric.
            options: of `self.log`.
            parts: what each loss of the step contributes to the value.
        """
        module, original, size = self._module, value, options.get("batch_size")
        results = module.trainer._results
        # outside of a batch, as in on_train_epoch_end, each rank counts once
        weight = 1.0 if results is None or results.batch is None else self._batches.weight
        if weight == 0.0 and not isinstance(value, Metric):
            # a neutral value does not change the reduction; the key must be logged, as on every other rank
            neutral, value = NEUTRAL.get(name_of(options.get("reduce_fx", "mean"))), torch.as_tensor(value)
            value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
            options = {**options, "batch_size": 0} if neutral is None else options
            value = torch.full_like(value, neutral or 0.0)
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
            metric = result.value  # if nobody logs its step values, they need not be gathered
            metric.dist_sync_on_step = any(other.meta.on_step for other in results.values() if other.value is metric)
            if self.metrics.losses:
                result._forward_cache = self.metrics.of_all_ranks(result._forward_cache)
        else:
            meta, count = result.meta, results.batch_size if size is None else size
            how = "sum" if meta.is_sum_reduction else "min" if meta.is_min_reduction else "max"
            samples = (1 if count is None else count) if weight else 0
            snapshot = original.detach().clone() if isinstance(original, Tensor) else original
            step_value = StepValue(result, snapshot, "mean" if meta.is_mean_reduction else how, size, samples, parts)
            self._keep(key, step_value, weight)
        if result.meta.on_epoch and result.meta.fx.partition(".")[0].endswith("_epoch_end"):
            result.compute()  # collective: now, because later callbacks may read it on one rank only

    def _keep(self, key: str, each: StepValue, weight: float) -> None:
        """Store a number that a step logged for `reduce_step`, or reduce it immediately outside of a step."""
        result = each.result
        if self.metrics.in_step:
            if each.how == "mean" and isinstance(result.value, Tensor) and result.value.dtype == torch.float64:
                # Lightning divides by the mean of the ranks' sample counts. The mean of integers gets the default
                # dtype, which has too few digits if ranks have different numbers of samples.
                result.cumulated_batch_size = result.cumulated_batch_size.double()
            self._logged[key] = each
        elif each.is_shown:
            reduction = StepReduction([each.term(weight)], [], weight, self._group)
            each.place(reduction.values()[0], by_targets=False)

    # ---------------------------------------------------------------- what the strategy calls

    @contextmanager
    def step(self, batch: BatchContext) -> Iterator[None]:
        """Surround the user's step: record its losses, and let metrics ignore samples of weight 0."""
        if self._may_leave and self._module.trainer.training:  # a rank may end its epoch while others wait in a step
            Exchange(Message(SyncPoint.STEP_BEGINS), self._host).wait(Words("a step that began"))
        self._place_reduced()
        self.metrics.in_step = True
        self.means, self._reduction = Means() if self._ranks > 1 else None, None
        try:
            with nullcontext() if batch.weight else self.metrics.uncounted():
                yield
        finally:
            self.metrics.in_step = False

    def reduce_step(self, batch: BatchContext, output: Any) -> None:
        """Start to reduce the values that the user's step logged; `wait` completes that. Collective over all ranks.

        Args:
            batch: of the step.
            output: of the user's step.

        Raises:
            ValueError: on every rank, if ranks logged different names, or only some of them returned a loss.
        """
        self._place_reduced()
        logged, self._logged = self._logged, {}
        trainer = self._module.trainer
        trains = self.means is not None and self._module.automatic_optimization and trainer.training
        if not (trains or logged) or (logged and trainer.predicting):
            return  # a rank that logged something compares it with the next message of this one, and all ranks raise
        skips = trains and output is None
        point = SyncPoint.STEP_WITHOUT_LOSS if skips else SyncPoint.STEP_ENDS
        means = self._agree(point, "a step that returned no loss and logged" if skips else "a step that logged", logged)
        terms, self._by_targets = list[Term](), bool(means)
        for value in logged.values():
            if value.is_shown or (means and value.how == "mean" and value.result.meta.on_epoch):
                self._reduced.append(value)
                terms.append(value.term(batch.weight))
        if terms or means:
            self._reduction = StepReduction(terms, means, batch.weight, self._group)

    @contextmanager
    def around_backward(self, batch: BatchContext, loss: Tensor, asked: bool) -> Iterator[None]:
        """Surround a backward pass: set the gradient scales of the losses before it. Collective over all ranks.

        Args:
            batch: of the step.
            loss: the loss to differentiate.
            asked: whether `counted` will be called with the loss.
        """
        means, in_step = self.means, self.metrics.in_step
        if means is not None and in_step:
            means.before_backward(loss)
            place = "a backward pass within a step"
            if self._reduction is None and (agreed := self._agree(SyncPoint.BACKWARD, place, {})):
                StepReduction([], agreed, batch.weight, self._group).values()
        if self._reduction is not None:
            self._reduction.values()
        if means is not None:
            self._counted = (loss.detach(), weighted_loss_value(loss, means)) if asked else None
        yield
        if self._module.automatic_optimization:
            self.wait()

    def wait(self) -> None:
        """Wait for pending step values and store them where callbacks and loggers read them. Ends the step."""
        self._place_reduced()
        self.means = self._reduction = None

    def scale(self, means: Means) -> None:
        """Set the gradient scales of losses whose backward runs within the step. Collective over `group`.

        If ranks have different numbers of losses, all losses of a rank get one scale: that of its loss as a whole.
        """
        if self.alone:
            return
        weight, group, device = self._batches.weight, self._group, self._module.device
        # [number, -number]: one minimum gives both the lowest and the highest number
        bounds = to_group_device(torch.tensor([len(means.all), -len(means.all)], device=device), group)
        dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=group)
        if bounds[0] == -bounds[1]:
            StepReduction([], means.all, weight, group).values()
            return
        zero = torch.zeros((), dtype=torch.float64, device=device)
        count = means.count if weight and means.count is not None else zero
        total = to_group_device(count.clone(), group)
        dist.all_reduce(total, group=group)
        factor = _scale(count, total.to(device), self._ranks, weight)
        for mean in means.all:
            mean.scale.factor = factor

    def counted(self, loss: Tensor) -> Tensor:
        """Return `weighted_loss_value` of the loss that went backward, whose mean over ranks is the global loss."""
        if self._counted is None:
            return loss
        value, counted = self._counted
        return torch.where(loss == value, counted, loss)

    # ---------------------------------------------------------------- messages

    def _place_reduced(self) -> None:
        reduced, self._reduced = self._reduced, []
        if reduced and self._reduction is not None:
            for step_value, value in zip(reduced, self._reduction.values(), strict=True):
                step_value.place(value, self._by_targets)

    def _agree(self, point: SyncPoint, said: str, logged: Mapping[str, StepValue]) -> Sequence[Mean]:
        """Compare what ranks logged, and return the losses that count by targets. Collective over all ranks.

        All of the step if ranks computed equally many; else those with gradients, if equally many; else none. Losses
        that are not returned count by samples.
        """
        by_samples = self.counts_by_samples and self._module.trainer.training
        means: Sequence[Mean] = [] if self.means is None or by_samples else [*self.means.all]
        learning = [mean for mean in means if mean.edge is not None]
        kinds = list[str]()  # must be the same on all ranks: "loss (mean by batch_size, on_step)"
        for key, value in logged.items():
            meta, weighting = value.result.meta, "" if value.batch_size is None else " by batch_size"
            when = f"{', on_step' if meta.on_step else ''}{', on_epoch' if meta.on_epoch else ''}"
            kinds.append(f"{key} ({value.how}{weighting}{when})")
        checksum = zlib.crc32("\n".join(kinds).encode())
        message = Message(point, checksum=checksum, means=len(means), learned_means=len(learning))
        most, least = Exchange(message, self._host).wait(Words(f"{said} {', '.join(kinds)}".rstrip()))
        if most.means == least.means:
            return means
        # e.g. one rank computed a further loss as a metric, without gradients
        if most.learned_means == least.learned_means:
            return learning
        if not self._differed and self._host.rank() == 0:
            log.warning(
                "ranks computed different numbers of losses in one step (rank 0: %d), so the mean over ranks weights "
                "them by samples, not by targets",
                len(means),
            )
        self._differed = True
        return []


def _log_nothing(*_: Any, **__: Any) -> None:
    """Ignore a call of `log` on a copy of a module."""


class ObservedStep(Generic[T]):
    """The user's step on a batch; calls record its losses in `StepLog.means`.

    Args:
        step: the user's.
        log: replaces `self.log` of the module.

    Attributes:
        after_silent_call: if set, calls are not recorded, and it undoes what each of them changed.
    """

    def __init__(self, step: Callable[..., T], log: StepLog) -> None:
        self._step, self._log = step, log
        self.after_silent_call: Callable[[], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """Run the step, and record what it logs and computes unless this is a probe's call, see `probing.silent`."""
        if self.after_silent_call is None:
            return self.recorded(*args, **kwargs)
        try:
            return self._step(*args, **kwargs)
        finally:
            self.after_silent_call()

    def recorded(self, *args: Any, **kwargs: Any) -> T:
        """Run the step, and record its losses."""
        with nullcontext() if self._log.means is None else self._log.means:
            return self._step(*args, **kwargs)
