"""A step in microbatches: the schedule runs in `forward`, its gradients reach the parameters in `backward`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.collectives.point_to_point import Lane, share_made, share_object
from lightning_parallel.techniques.division import Division
from lightning_parallel.techniques.pipeline_parallel.batch_work import BatchWork, LossStage, loss_of
from lightning_parallel.techniques.pipeline_parallel.executor import Executor
from lightning_parallel.techniques.pipeline_parallel.gradients import ApplyPrecomputedGrads, Gradients
from lightning_parallel.techniques.pipeline_parallel.layout import SMALL, StageLayout
from lightning_parallel.techniques.pipeline_parallel.loss import Shares, joined
from lightning_parallel.techniques.pipeline_parallel.p2p import P2P
from lightning_parallel.techniques.pipeline_parallel.probe import (
    NOTHING,
    REMEDIES,
    Measured,
    Pending,
    SameDraws,
    rows_of,
    tolerance,
)
from lightning_parallel.techniques.pipeline_parallel.rng import GeneratorStates
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import Schedule
from lightning_parallel.techniques.pipeline_parallel.stages import Path, Stages
from lightning_parallel.techniques.step import BatchContext, Step, StepFn, WrappedStep
from lightning_parallel.techniques.tools import microbatches
from lightning_parallel.techniques.tools.elsewhere import StageTree
from lightning_parallel.techniques.tools.means import is_among
from lightning_parallel.techniques.tools.microbatches import Dims
from lightning_parallel.techniques.tools.shards import local
from lightning_parallel.techniques.tools.telling import warn
from lightning_parallel.techniques.tools.undone_writes import UndoneWrites
from lightning_parallel.values import map_tensors

T = TypeVar("T")


Tie = tuple[int, ...]
"""The ranks of a pipeline that hold one parameter, ascending."""


class LastStage(NamedTuple):
    """What the last stage tells all ranks of a batch.

    Attributes:
        output: of the step.
        unclear: parts of it that could not be merged, see `microbatches.merge`.
        records: of what it logged and kept, see `BatchRecords.collect`.
        unit: how many targets count as one in gradients; None if these are means.
        draws: where the generators are left, if anything was drawn.
        pair: which microbatches are measured, see `Pending.pair`.
        attributes: see `Stages`.
    """

    output: Any
    unclear: list[str]
    records: Any
    unit: float | None
    draws: GeneratorStates | None
    pair: tuple[int, int] | None
    attributes: Mapping[Path, Any]


class PipelineStep(WrappedStep):
    """Runs every step of the user's as a schedule over the ranks of a pipeline.

    Args:
        inner: the step to wrap.
        model: of which this rank holds its stages' part.
        made: where the model is cut.
        schedule: what each rank does, and when.
        over_batch: whether what follows the blocks runs once for the batch.
        unit: see `Shares`.
        dims: where samples are in batches, see `ParallelPlan.batch_dims`.
        pending: decides in which batches the loss is measured; None for a loss that is accepted as it is.
        group: the ranks of this pipeline.
        device: where the model runs.
        tree: see `Stages`.
        divisions: of all techniques: they encode what goes from stage to stage.
    """

    def __init__(
        self,
        inner: Step,
        model: nn.Module,
        made: StageLayout,
        schedule: Schedule,
        over_batch: bool,
        unit: float,
        dims: Dims,
        pending: Pending | None,
        group: dist.ProcessGroup,
        device: torch.device,
        tree: StageTree,
        divisions: Sequence[Division],
    ) -> None:
        super().__init__(inner)
        self._schedule, self._unit, self._group, self._cut = schedule, unit, group, made
        self._over_batch, self._dims, self._pending = over_batch, dims, pending
        self._lane = Lane(group, device)
        self._rank = group.rank()
        self._here = schedule.stages_of(self._rank)
        self._stages = Stages(model, made, device, tree)
        self._p2p = P2P(self._lane, schedule.rank_of, schedule.stages)
        self._parameters = _parameters(model, made, schedule)
        self._common = common_buffers(model, made)
        self._context, self._divisions = BatchContext(), divisions
        self._told: set[str] = set()
        self._divides = False  # whether some batch could be divided

    @property
    def applies_sample_weight(self) -> bool:
        """See `Step.applies_sample_weight`."""
        return True

    def close(self) -> None:
        """See `Step.close`."""
        self._stages.close()
        self.inner.close()

    def begin_batch(self, batch: BatchContext) -> None:
        """See `Step.begin_batch`."""
        self._context = batch

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """Runs the schedule, and returns on every rank what the step would return for the whole batch.

        Raises:
            TypeError: a batch that cannot be divided.
            ValueError: a step that returns a loss for some microbatches only, or one that is no mean over samples or
                targets; as all errors in what it returned or logged, on every rank of the pipeline.
        """
        parameters = self._now()
        records = self._context.records
        records.track_buffers(self._common)
        batch, *rest = args
        parts = self._divided(batch)
        sizes = microbatches.part_sizes(microbatches.samples_in(batch, self._dims) or 1, len(parts))
        call = _Call(run, (tuple(rest), kwargs))
        work = self._work(call, batch, parts, sizes, torch.is_grad_enabled())
        self._stages.draws.begin(self._context.index)
        self._stages.attributes = {}
        self._execute(work)
        last = self._shared(work)
        self._stages.draws.end(last.draws)
        self._stages.set_attributes(last.attributes)
        if last.pair is not None:
            self._measure(call, batch, sizes, last.pair)
        records.replay(last.records)
        self._warn_of(last.unclear)
        loss = loss_of(last.output)
        if not work.training or loss is None:
            return cast(T, last.output)
        with torch._C.DisableTorchFunctionSubclass():
            learning = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        handed = self._handed_over(loss, work, learning, self._context.scale / (last.unit or 1.0))
        return cast(T, _with_loss(last.output, records.normalize_loss(handed)))

    def _warn_of(self, unclear: Sequence[str]) -> None:
        """Warns once of each part of the output that differs between microbatches in a way that cannot be merged."""
        if new := [name for name in unclear if name not in self._told]:
            self._told.update(new)
            warn(
                f"In a pipeline, what the step returns as {', '.join(new)} differs between microbatches. Rows of "
                "samples are joined, and single floating-point numbers averaged by samples. Other tensors and integers "
                "are averaged, too, and of other values the first is taken: return a row for each sample instead, or "
                "log counts by self.log(..., reduce_fx='sum')"
            )

    # ---------------------------------------------------------------- before

    def _divided(self, batch: Any) -> list[Any]:
        """The microbatches.

        A later batch that cannot be divided is one microbatch, as where one of several loaders comes to its end. Where
        ranks meet within the forward, they must divide alike.

        Raises:
            ValueError: something in the batch has another number of samples.
        """
        count = min(
            self._schedule.microbatches, self._context.samples or microbatches.samples_in(batch, self._dims) or 1
        )
        try:
            parts = microbatches.split(batch, count, self._dims)
        except ValueError:
            if not self._divides or self._context.samples is not None:
                raise
            return [batch]
        self._divides = True
        return parts

    def _work(
        self, call: _Call, batch: Any, parts: Sequence[Any], sizes: Sequence[int], training: bool = False
    ) -> BatchWork:
        """The work on some microbatches of a batch.

        Args:
            call: the user's step.
            batch: all samples.
            parts: the microbatches.
            sizes: how many samples these have.
            training: whether gradients are computed; the same on all ranks, for it decides how they send.
        """
        context, parameters = self._context, self._now()
        join = partial(joined, sizes=sizes, blocks=self._cut.trace.blocks)
        together = self._over_batch or self._schedule.microbatches == 1 or (len(parts) == 1 and context.alone)
        shares = Shares(
            [sum(sizes)] if self._over_batch else sizes, context.weight, self._unit, together, context.alone
        )
        gradients = {stage: Gradients(self._of_stage(stage, parameters)) for stage in self._here}
        loss_stage = LossStage(batch, join) if self._over_batch else None
        return BatchWork(
            call.step, parts, call.arguments, context, self._divisions, loss_stage, shares, gradients, training
        )

    def _execute(self, work: BatchWork) -> None:
        count = len(work.microbatches)
        schedule = self._schedule.only(count) if count < self._schedule.microbatches else self._schedule
        with self._stages.attached():
            Executor(self._stages, self._p2p, work).run(schedule.with_communication()[self._rank])

    def _now(self) -> dict[str, nn.Parameter]:
        """The parameters at this moment that may learn."""
        parameters = {name: cast(nn.Parameter, p.owner._parameters[p.key]) for name, p in self._parameters.items()}
        with torch._C.DisableTorchFunctionSubclass():  # rows that arrive are not waited for
            return {name: each for name, each in parameters.items() if each.is_floating_point() or each.is_complex()}

    def _of_stage(self, stage: int, parameters: dict[str, nn.Parameter]) -> list[nn.Parameter]:
        return [parameter for name, parameter in parameters.items() if stage in self._parameters[name].stages]

    # ---------------------------------------------------------------- after

    def _measure(self, call: _Call, batch: Any, sizes: Sequence[int], pair: tuple[int, int]) -> None:
        """Measures the loss of some samples of two microbatches, in one batch and in two. Collective over all ranks.

        Raises:
            ValueError: on all ranks, if the two losses differ on one of them, or if the step changes parameters.
        """
        rows, works = rows_of(sizes, pair), list[BatchWork]()
        last = self._schedule.rank_of(self._schedule.stages - 1)
        with (
            self._context.silent() as writes,
            self._stages.measured(),
            SameDraws(),  # type: ignore[no-untyped-call]
        ):
            for chosen in ([rows], [[each] for each in rows]) if pair[0] != pair[1] else ():
                parts = [map_tensors(Tensor.clone, microbatches.select(batch, each, self._dims)) for each in chosen]
                taken = [sum(some.stop - some.start for some in each) for each in chosen]
                works.append(self._work(call, microbatches.select(batch, rows, self._dims), parts, taken))
                self._execute(works[-1])
        assert self._pending is not None
        pending, taken = self._pending, [some.stop - some.start for some in rows]
        device, changed = self._lane.device, self._changed_parameter(writes)

        def agreed() -> Measured | None:
            measured = pending.agree(self._measured(works, taken))
            if changed is not None:
                raise ValueError(
                    f"In a pipeline, the step changes {changed} in place, as an average, noise or clamped weights; "
                    "each microbatch would do so, and what follows the blocks runs on the last stage only: change it "
                    "in hooks, as on_train_batch_start and on_train_batch_end, or use ZeroStrategy"
                )
            return measured

        found = share_made(agreed, "what was measured of a loss", last, self._group, device)
        if found is not None:
            raise ValueError(f"In a pipeline, {found}: {REMEDIES[self._over_batch]}")

    def _changed_parameter(self, writes: UndoneWrites | None) -> str | None:
        """Describe what a step keeps and changes on some stage, or writes on some of the stages that hold it alike.

        Collective over all ranks.
        """
        kept, wrote, own = None, set[str](), set[str]()
        if writes is not None:
            own = {name for name, _ in self._stages.model.named_parameters()}
            kept, wrote = (
                writes.kept_by(self._stages.model, 2 * self._over_batch),
                writes.parameters_written(self._stages.model),
            )
        found = [
            share_object((kept, wrote, own), rank, self._group, self._lane.device) for rank in range(self._group.size())
        ]
        alone = (name for _, wrote, _ in found for name in sorted(wrote) if any(name in o - w for _, w, o in found))
        named = (f"the parameter {name}" for name in alone)
        return next((kept for kept, *_ in found if kept is not None), None) or next(named, None)

    def _measured(self, works: Sequence[BatchWork], sizes: Sequence[int]) -> Measured:
        losses = [[loss_of(work.outputs[number]) for number in range(len(work.shares.sizes))] for work in works]
        if not works or any(loss is None for some in losses for loss in some):
            return NOTHING
        (whole,), parts = [[float(loss) for loss in some if loss is not None] for some in losses]
        shares, _ = works[1].shares.final()
        together = sum(loss * share for loss, share in zip(parts, shares, strict=True))
        unlike = len(shares) > 1 and abs(shares[0] - sizes[0] / sum(sizes)) > 1e-6
        return Measured(sizes, whole, together, unlike, tolerance(self._stages.model, self._lane.device))

    def _pair(self, work: BatchWork, shares: Sequence[float]) -> tuple[int, int] | None:
        if self._pending is None or not work.training:
            return None
        sizes = microbatches.part_sizes(sum(work.shares.sizes), len(work.microbatches))
        return self._pending.pair(sizes, [size / sum(sizes) for size in sizes] if self._over_batch else shares)

    def _shared(self, work: BatchWork) -> LastStage:
        """Gives all ranks what the last stage has."""

        def said() -> LastStage:
            records = self._context.records
            sizes = work.shares.sizes
            outputs = [work.outputs[number] for number in range(len(sizes))]
            _require_all_or_none(outputs, work.training)
            shares, unit = work.shares.final()
            means = {number: work.means_of(number) for number in work.outputs}
            averaged = [means[number] for number in range(len(sizes))]
            multiples = [work.multiples_of(number) for number in range(len(sizes))]
            merged, unclear = microbatches.merge(outputs, sizes, shares, multiples)
            if work.training:
                if self._pending is not None:
                    work.require_alike_terms(shares)
                merged = _with_loss_of_parts(merged, outputs, sizes, shares, averaged)
            merged = map_tensors(Tensor.cpu, merged)
            collected = records.collect(list(means.values()), work.shares.targets)
            draws, attributes = self._stages.draws.left, self._stages.attributes
            return LastStage(merged, unclear, collected, unit, draws, self._pair(work, shares), attributes)

        last = self._schedule.rank_of(self._schedule.stages - 1)
        told = share_made(
            said, "what a step returned, logged or keeps on the module", last, self._group, self._lane.device
        )
        return told._replace(output=map_tensors(lambda tensor: tensor.to(self._lane.device), told.output))

    def _handed_over(self, loss: Tensor, work: BatchWork, learning: dict[str, nn.Parameter], scale: float) -> Tensor:
        sums: dict[str, Tensor | None] = dict.fromkeys(learning)
        leaves: dict[str, Tensor] = {}
        names = {id(parameter): name for name, parameter in learning.items()}
        for gradients in work.gradients.values():
            for parameter, leaf, gradient in gradients.take():
                name = names.get(id(parameter))
                if name is not None:  # it learns
                    leaves[name], before = leaf, sums[name]
                    sums[name] = gradient if before is None or gradient is None else before + gradient
                    sums[name] = before if gradient is None else sums[name]
        self._sum_ties(sums, learning)
        always = torch.zeros((), requires_grad=True)  # a stage may have no parameter that learns
        # what has none is left out: autograd would call hooks on it with None
        given = {name: gradient for name, gradient in sums.items() if gradient is not None}
        handed: Tensor = ApplyPrecomputedGrads.apply(  # type: ignore[no-untyped-call]
            loss, list(given.values()), scale, always, *(leaves[name] for name in given)
        )
        return handed

    def _sum_ties(self, sums: dict[str, Tensor | None], learning: dict[str, nn.Parameter]) -> None:
        shared: dict[Tie, list[Tensor]] = {}
        for name in sorted(sums):
            ranks = self._parameters[name].ranks
            if len(ranks) > 1:
                gradient = sums[name]
                sums[name] = torch.zeros_like(local(learning[name].detach())) if gradient is None else gradient
                shared.setdefault(ranks, []).append(cast(Tensor, sums[name]))
        sum_over_holders(shared, self._lane, self._rank)


class _Call(NamedTuple):
    """The user's step, and its arguments behind the batch."""

    step: StepFn[Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]


class _StageParameter(NamedTuple):
    """A parameter on this rank: where it is, as techniques may replace it for a step; who uses it; who holds it."""

    owner: nn.Module
    key: str
    stages: frozenset[int]
    ranks: Tie


def _parameters(model: nn.Module, made: StageLayout, schedule: Schedule) -> dict[str, _StageParameter]:
    found: dict[str, _StageParameter] = {}
    for name, _ in model.named_parameters():
        owner, _, key = name.rpartition(".")
        stages = made.stages_of(name)
        ranks = tuple(sorted({schedule.rank_of(stage) for stage in stages}))
        found[name] = _StageParameter(model.get_submodule(owner), key, stages, ranks)
    return found


def _with_loss_of_parts(
    output: Any,
    outputs: Sequence[Any],
    sizes: Sequence[int],
    shares: Sequence[float],
    means: Sequence[Sequence[Tensor]],
) -> Any:
    """The output with the loss whose gradient the parts have: it counts by shares, or by samples."""
    losses = [loss for each in outputs if (loss := loss_of(each)) is not None]
    if len(losses) < len(outputs):
        return output
    by_shares = all(is_among(loss, averaged) for loss, averaged in zip(losses, means, strict=True))
    return _with_loss(output, microbatches.weighted_mean(losses, shares if by_shares else sizes))


def _with_loss(output: Any, loss: Tensor) -> Any:
    return {**output, "loss": loss} if isinstance(output, dict) else loss


def _require_all_or_none(outputs: Sequence[Any], training: bool) -> None:
    without = [number for number, output in enumerate(outputs) if loss_of(output) is None]
    if training and without and len(without) < len(outputs):
        raise ValueError(
            f"training_step returned no loss for microbatches {without} of {len(outputs)}; in a pipeline a batch is "
            "skipped as a whole, by a loss times zero: Lightning takes no None on several ranks"
        )


def sum_over_holders(gradients: Mapping[Tie, Sequence[Tensor]], lane: Lane, rank: int) -> None:
    """Sums gradients in place over the ranks that hold their parameters, in one order, so that all get equal sums.

    Args:
        gradients: by the ranks that hold them, this one among them; the same tensors in the same order on each.
        lane: the ranks of the pipeline.
        rank: this rank in it.
    """
    for holders, tensors in sorted(gradients.items()):
        own = torch.cat([tensor.reshape(-1) for tensor in tensors])
        others = {holder: torch.empty_like(own) for holder in holders if holder != rank}
        lane.exchange(own, others)
        parts = others | {rank: own}
        total = sum((parts[holder] for holder in holders[1:]), parts[holders[0]])
        for tensor, values in zip(tensors, torch.split(total, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(values.view_as(tensor))


def common_buffers(model: nn.Module, made: StageLayout) -> list[str]:
    """The FQN of buffers that all stages have, and that a step may change."""
    common = [(name, buffer) for name, buffer in model.named_buffers() if made.is_common(name)]
    return [name for name, buffer in common if name in made.trace.written or buffer.numel() <= SMALL]
