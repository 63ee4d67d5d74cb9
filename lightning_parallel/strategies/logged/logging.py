"""`self.log` behaves as with `sync_dist=True`, and shows all ranks the values of the whole batch.

Values of ranks are combined by `reduce_fx`. A mean weighs by `batch_size`, the samples of the rank, and a mean loss of
torch's own or `lightning_parallel.mean` by its targets. Epoch values are reduced when Lightning computes them. Step
values are reduced together, in one message per step that travels while backward runs; with it ranks find out whether
they logged the same names, as a reduction of what only some ranks log would never end.

A mean v of rank (or microbatch) r is a sum of multiples of losses that count by their targets (`Mean`), and of a rest
that counts by samples: v_r = rest_r + sum_k part_kr. Rank r has w_r samples, and loss k of it is over c_kr targets.
Over all R ranks

    value = sum_r w_r rest_r / sum_r w_r + sum_k (sum_r c_kr part_kr) / (sum_r c_kr)

and its gradient is that of each rank, averaged by samples, where that of loss k is multiplied by

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

from lightning_parallel.collectives.functional import Pending, packed, within_reach
from lightning_parallel.strategies.data.batches import Batches, Exchange, Message, SyncPoint, Words
from lightning_parallel.strategies.lightning_package import LightningModule, _Metadata, _ResultMetric, is_overridden
from lightning_parallel.strategies.logged.metrics import MetricsOfRun
from lightning_parallel.techniques.step import BatchContext
from lightning_parallel.techniques.tools.means import Mean, Means

log = logging.getLogger(__name__)

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

SIGNS = {"max": 1.0, "min": -1.0}
"""A minimum is sent as the maximum of negative values."""
NEUTRAL = {"sum": 0.0, "min": float("inf"), "max": float("-inf")}
"""What a batch that does not count contributes to a reduction; to a mean it contributes with weight zero."""
OPTIONS = (*signature(LightningModule.log).parameters,)[3:]
"""The options of `self.log` after the name and the value."""


# ---------------------------------------------------------------- values of ranks, or of microbatches


class Term(NamedTuple):
    """What a rank or a microbatch contributes to a value.

    Attributes:
        how: the reduction: mean, sum, min or max.
        value: a number.
        weight: of a mean: the samples that it counts for.
        parts: contributions of the step's means to it.
    """

    how: str
    value: Tensor
    weight: float = 1.0
    parts: Mapping[Any, Tensor] = {}


def to_sums(terms: Sequence[Term], counts: Mapping[K, Tensor]) -> list[Tensor]:
    """The numbers that are added up over the terms of ranks, which are means and sums.

    Args:
        terms: of this rank.
        counts: over how many targets each mean is.
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
    """The value of the whole batch of each term, and the contributions of means to it.

    Args:
        numbers: of `to_sums`, added up.
        terms: the same as there.
        means: likewise.
        alone: whether a mean over no targets at all is nan, as on one device; else it is 0.
    """
    totals, left = numbers[len(numbers) - len(means) :], iter(numbers)
    for how, _, _, parts in terms:
        if how == "sum":
            yield next(left), {}
            continue
        whole: dict[K, Tensor] = {}
        for mean, total in zip(means, totals, strict=True):
            part = next(left) / total
            whole[mean] = part if alone and mean in parts else torch.where(total == 0, 0.0, part)
        yield sum(whole.values(), start=next(left) / next(left)), whole


class StepReduction:
    """Reduces values over ranks. The messages, one of sums and one of extremes, are under way when this is made.

    All ranks have as many values and means, of the same kinds.

    Args:
        terms: this rank's parts of the values.
        means: of the step.
        weight: of this rank, 1 on average; 0.0: it counts nowhere.
        group: the ranks.
    """

    def __init__(self, terms: Sequence[Term], means: Sequence[Mean], weight: float, group: dist.ProcessGroup) -> None:
        self._terms, self._weight, self._ranks = terms, weight, group.size()
        # by mean: its targets on this rank, a scalar
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
        # one message each, [numbers], in double precision; backward runs while they travel
        for numbers, operation in ((to_sums(self._added, self._counts), "SUM"), (extremes, "MAX")):
            if numbers:
                sent: Any = packed(numbers, group)
                work = dist.all_reduce(sent, getattr(dist.ReduceOp, operation), group=group, async_op=True)
                self._sent.append((sent, Pending(work)))

    def values(self) -> list[Tensor]:
        """Wait, and return the values of the whole batch; the scales of the means are filled in, too."""
        if self._values is not None:
            return self._values
        self._values, numbers = [], list[Tensor]()
        for sent, work in self._sent:
            work.wait()
            numbers += sent.unbind()
        # sums, then the counts of means, then extremes
        end = len(numbers) - (len(self._terms) - len(self._added))
        added, maxima = from_sums(numbers[:end], self._added, [*self._counts]), iter(numbers[end:])
        for term in self._terms:
            self._values.append(SIGNS[term.how] * next(maxima) if term.how in SIGNS else next(added)[0])
        for (mean, count), total in zip(self._counts.items(), numbers[end - len(self._counts) : end], strict=True):
            mean.scale.factor = _scale(count, total.to(count.device), self._ranks, self._weight)
            mean.total.factor = torch.where(total == 0, 0.0, self._ranks / total).to(count.device)
        return self._values


def _scale(own: Tensor, total: Tensor, ranks: int, weight: float) -> Tensor:
    """By what the gradient of a mean is multiplied; by zero where there is nothing to average, on this rank or any."""
    scale = own * (ranks / weight) / total if weight else torch.zeros_like(own)
    return torch.where(total == 0, 0.0, scale)


def counted_loss(loss: Tensor, means: Means) -> Tensor:
    """The loss with the contributions of means multiplied as their gradients are, its other parts as they are."""
    counted = loss.detach()
    for mean, part in means.parts_of(loss).items():
        factor = mean.scale.factor
        counted = counted if factor is None else counted + part * (factor - 1).to(part)
    return counted


# ---------------------------------------------------------------- values that a step logs


@dataclass(frozen=True)
class StepValue:
    """A value that a step logged under one name.

    Attributes:
        result: Lightning's private result of the name.
        value: as it was then: a step may change it in place later, and memory of ZeRO 3 goes when the step ends.
        how: the reduction: mean, sum, min or max.
        batch_size: the user's own; None for the samples of the batch.
        samples: by so many Lightning has counted the value in the mean of the epoch.
        parts: contributions of the step's means to it.
    """

    result: _ResultMetric
    value: Any
    how: str
    batch_size: float | None
    samples: float
    parts: Mapping[Mean, Tensor]

    @property
    def is_shown(self) -> bool:
        """Whether loggers see the value of each step."""
        return bool(self.result.meta.on_step and self.result._forward_cache is not None)

    def term(self, weight: float) -> Term:
        """This rank's part of the value; `weight` is that of its samples, 1 on average."""
        # a number of Python's has more digits than the dtype that it would get here
        value = torch.as_tensor(self.value, dtype=torch.float64 if isinstance(self.value, float) else None)
        if self.how != "mean":
            return Term(self.how, value if weight else torch.full_like(value, NEUTRAL[self.how], dtype=torch.float64))
        own = weight if self.batch_size is None or not weight else self.batch_size
        return Term("mean", value, own, self.parts)

    def place(self, value: Tensor, by_targets: bool) -> None:
        """Put the value of the whole batch in the place of this rank's, and into the epoch's if targets counted."""
        result, meta = self.result, self.result.meta
        if self.is_shown:
            assert result._forward_cache is not None
            result._forward_cache = value.to(result._forward_cache)
            if not meta.on_epoch:
                result.value = result._forward_cache
        if by_targets and self.how == "mean" and meta.on_epoch and self.samples:
            assert isinstance(result.value, Tensor)
            own = torch.as_tensor(self.value).to(result.value).reshape(())
            result.value = result.value + (value.to(own) - own) * self.samples


def name_of(reduction: Any) -> str:
    """The name of a `reduce_fx`."""
    return (reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "mean")).lower()


class StepLog:
    """Replaces `log` of a module during a run, so that ranks that read different samples log values of all of them.

    Args:
        module: the user's.
        group: the ranks that read different samples.
        host: all ranks, for messages of the host.
        batches: has the weight of the batch at hand.
        pipelined: whether steps run on microbatches.
        back: gives the module its own `log` and the metrics their own groups back.

    Attributes:
        alone: whether no other rank reads other samples.
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
        back: ExitStack,
    ) -> None:
        self._module, self._batches = module, batches
        self._group, self._host, self._ranks = group, host, group.size()
        self.alone = self._ranks == 1
        self.defers = self.counts_by_samples = False
        self._logged: dict[str, StepValue] = {}
        #: of the values of a step under way, with these, and whether they count by means over targets
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
        self.metrics = MetricsOfRun(module, group, pipelined, back)
        module.__dict__["log"] = self
        back.callback(module.__dict__.pop, "log", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """A copy of the module, which callbacks make to average its weights, logs nothing."""
        return _log_nothing

    # ---------------------------------------------------------------- what the user calls

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """`LightningModule.log` with `sync_dist=True`, except that step values wait for `reduce_step`."""
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
                parts[mean] = part.detach().clone()  # as they are now
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
        # outside of a batch, as in on_train_epoch_end, each rank counts once
        weight = 1.0 if results is None or results.batch is None else self._batches.weight
        if weight == 0.0 and not isinstance(value, Metric):
            # leaves the reduction as it is; the key is logged all the same, as on every other rank
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
            metric = result.value  # whose values in single steps, if nobody logs them, need not be gathered
            metric.dist_sync_on_step = any(each.meta.on_step for each in results.values() if each.value is metric)
            if self.metrics.losses:
                result._forward_cache = self.metrics.of_all_ranks(result._forward_cache)
        else:
            meta, count = result.meta, results.batch_size if size is None else size
            how = "sum" if meta.is_sum_reduction else "min" if meta.is_min_reduction else "max"
            samples = (1 if count is None else count) if weight else 0
            kept = given.detach().clone() if isinstance(given, Tensor) else given
            each = StepValue(result, kept, "mean" if meta.is_mean_reduction else how, size, samples, parts)
            self._keep(key, each, weight)
        if result.meta.on_epoch and result.meta.fx.partition(".")[0].endswith("_epoch_end"):
            result.compute()  # now, while all ranks are here: callbacks may read it on one of them

    def _keep(self, key: str, each: StepValue, weight: float) -> None:
        """Remember a number that a step logged, or reduce it at once outside of a step."""
        result = each.result
        if self.metrics.in_step:
            if each.how == "mean" and isinstance(result.value, Tensor) and result.value.dtype == torch.float64:
                # Lightning divides by the mean of the ranks' counts of samples. That of integers has the default
                # dtype, which has too few digits where samples do not divide evenly among ranks.
                result.cumulated_batch_size = result.cumulated_batch_size.double()
            self._logged[key] = each
        elif each.is_shown:
            reduction = StepReduction([each.term(weight)], [], weight, self._group)
            each.place(reduction.values()[0], by_targets=False)

    # ---------------------------------------------------------------- what the strategy calls

    @contextmanager
    def step(self, batch: BatchContext) -> Iterator[None]:
        """Around the user's step, for its means; metrics do not count samples of weight 0."""
        if self._may_leave and self._module.trainer.training:  # and steps of some techniques wait for each other
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
        terms, self._by_targets = list[Term](), bool(means)
        for each in logged.values():
            if each.is_shown or (means and each.how == "mean" and each.result.meta.on_epoch):
                self._reduced.append(each)
                terms.append(each.term(batch.weight))
        if terms or means:
            self._reduction = StepReduction(terms, means, batch.weight, self._group)

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
        """Fill in by what the gradients of means are multiplied whose backward runs within the step. Collective.

        Ranks may have other numbers of means; these then count as a whole.
        """
        if self.alone:
            return
        weight, group, device = self._batches.weight, self._group, self._module.device
        # [number, -number]: the minimum tells both the least and the most
        least = within_reach(torch.tensor([len(means.all), -len(means.all)], device=device), group)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        if least[0] == -least[1]:
            StepReduction([], means.all, weight, group).values()
            return
        zero = torch.zeros((), dtype=torch.float64, device=device)
        count = means.count if weight and means.count is not None else zero
        total = within_reach(count.clone(), group)
        dist.all_reduce(total, group=group)
        factor = _scale(count, total.to(device), self._ranks, weight)
        for mean in means.all:
            mean.scale.factor = factor

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
                each.place(value, self._by_targets)

    def _agree(self, point: SyncPoint, said: str, logged: Mapping[str, StepValue]) -> Sequence[Mean]:
        """The step's means if all ranks computed the same, else those that learn, or none; others count by samples."""
        by_samples = self.counts_by_samples and self._module.trainer.training
        means: Sequence[Mean] = [] if self.means is None or by_samples else [*self.means.all]
        learning = [mean for mean in means if mean.edge is not None]
        kinds = list[str]()  # ranks must send all values in one way: "loss (mean by batch_size, on_step)"
        for key, each in logged.items():
            meta, weighs = each.result.meta, "" if each.batch_size is None else " by batch_size"
            when = f"{', on_step' if meta.on_step else ''}{', on_epoch' if meta.on_epoch else ''}"
            kinds.append(f"{key} ({each.how}{weighs}{when})")
        checksum = zlib.crc32("\n".join(kinds).encode())
        message = Message(point, checksum=checksum, means=len(means), learned_means=len(learning))
        most, least = Exchange(message, self._host).wait(Words(f"{said} {', '.join(kinds)}".rstrip()))
        if most.means == least.means:
            return means
        # as where one rank computed a metric of its own besides the loss
        if most.learned_means == least.learned_means:
            return learning
        if not self._differed and self._host.rank() == 0:
            log.warning(
                "ranks computed different numbers of losses in one step (here %d), so these count by samples, not by "
                "targets, in the mean over ranks",
                len(means),
            )
        self._differed = True
        return []


def _log_nothing(*_: Any, **__: Any) -> None:
    """What a copy of a module logs."""


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
        if self.after_silent_call is not None:  # the call is not recorded, and what it has changed is taken back
            try:
                return self._step(*args, **kwargs)
            finally:
                self.after_silent_call()
        with nullcontext() if self._log.means is None else self._log.means:
            return self._step(*args, **kwargs)
