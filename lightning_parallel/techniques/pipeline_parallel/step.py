"""A step in microbatches: `forward` runs the schedule with all backwards, `backward` applies their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from lightning_parallel.collectives.point_to_point import Channel, broadcast_object, compute_on_one_rank
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.pipeline_parallel import probe
from lightning_parallel.techniques.pipeline_parallel.batch_work import BatchWork, loss_of
from lightning_parallel.techniques.pipeline_parallel.executor import Executor
from lightning_parallel.techniques.pipeline_parallel.gradients import ApplyPrecomputedGrads, Gradients
from lightning_parallel.techniques.pipeline_parallel.layout import SMALL, StageLayout
from lightning_parallel.techniques.pipeline_parallel.p2p import P2P, has_gradients
from lightning_parallel.techniques.pipeline_parallel.probe import LossComparison, Pending
from lightning_parallel.techniques.pipeline_parallel.rng import GeneratorStates
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import Schedule
from lightning_parallel.techniques.pipeline_parallel.stages import Path, Stages
from lightning_parallel.techniques.step import BatchContext, Step, StepFn, WrappedStep
from lightning_parallel.techniques.tools import microbatches
from lightning_parallel.techniques.tools.means import is_among
from lightning_parallel.techniques.tools.stage_tree import StageTree
from lightning_parallel.techniques.tools.user_warnings import warn
from lightning_parallel.values import map_tensors

T = TypeVar("T")

Tie = tuple[int, ...]
"""The ranks of a pipeline that hold one parameter, ascending."""


class BatchResults(NamedTuple):
    """Results of a batch that the last stage sends to all ranks of the pipeline."""

    output: Any  # of the step, merged over microbatches
    unclear: list[str]  # parts of the output that could not be merged, see `microbatches.merge`
    records: Any  # values that the step logged and stored, see `BatchRecords.collect`
    unit: float | None  # divisor of target counts in gradients, see `BatchWork`; None if gradients are means
    draws: GeneratorStates | None  # states of the generators after the batch; None if nothing was drawn
    pair: tuple[int, int] | None  # microbatches to measure, see `Pending.pair`
    attributes: Mapping[Path, Any]  # see `Stages.attributes`


@dataclass(eq=False)
class PipelineDivision(Division):
    """A model of which this rank holds some stages."""

    context: PartitionContext  # mesh and plan
    layout: StageLayout  # where the model is cut
    schedule: Schedule  # what each rank computes, in which order
    tree: StageTree  # holds absent tensors in place of parameters of other stages
    targets: int  # approximate number of targets in a batch, see `BatchWork.unit`
    over_batch: bool  # whether code after the blocks runs once for the full batch
    probes: bool  # whether losses are measured, see `probe`

    @property
    def losses_over_batch(self) -> bool:
        """See `Division.losses_over_batch`."""
        return self.over_batch or self.schedule.microbatches == 1

    def step(self, step: Step) -> Step:
        """Return a step that runs the schedule."""
        return PipelineStep(step, self)


class PipelineStep(WrappedStep):
    """Runs the user's steps as schedules over the ranks of a pipeline; see `forward`."""

    def __init__(self, inner: Step, divided: PipelineDivision) -> None:
        super().__init__(inner)
        mesh, model, schedule = divided.context.mesh, divided.model, divided.schedule
        self._divided, self._schedule, self._dims = divided, schedule, divided.context.plan.batch_dims
        self._group, self._device, self._over_batch = mesh["pp"].get_group(), mesh.device, divided.over_batch
        self._pending = Pending(mesh.loss.get_group(), mesh.device, not divided.over_batch) if divided.probes else None
        self._rank, self._last = self._group.rank(), schedule.rank_of(schedule.stages - 1)
        self._here = schedule.stages_of(self._rank)
        self._stages = Stages(model, divided.layout, mesh.device, divided.tree)
        self._p2p = P2P(Channel(self._group, mesh.device), schedule.rank_of, schedule.stages)
        self._parameters: dict[str, _StageParameter] = {}
        for name, _ in model.named_parameters():
            owner, _, key = name.rpartition(".")
            stages = divided.layout.stages_of(name)
            ranks = tuple(sorted({schedule.rank_of(stage) for stage in stages}))
            self._parameters[name] = _StageParameter(model.get_submodule(owner), key, stages, ranks)
        # buffers that all stages hold and that the step may write to
        layout, written = divided.layout, divided.layout.trace.written
        self._common = [
            name
            for name, buffer in model.named_buffers()
            if layout.stage_holding(name) is None and not layout.part_of(name)
            if name in written or buffer.numel() <= SMALL
        ]
        self._context = BatchContext()
        self._told: set[str] = set()  # parts of outputs that could not be merged, as already warned of
        self._divides = False  # whether a batch has been split into microbatches

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
        """Run the schedule on the microbatches, and return the step's output for the full batch on every rank.

        All backwards run here, too; the backward of the returned loss only applies their gradients. Collective over the
        pipeline, and over all ranks while losses are measured.

        Raises:
            TypeError: the batch cannot be split.
            ValueError: the step returns a loss for some microbatches only, or a loss that is no mean over samples or
                targets. Like all errors in outputs and logged values, it is raised on every rank of the pipeline.
        """
        records = self._context.records
        records.track_buffers(self._common)
        batch, *rest = args

        def step(batch: Any) -> T:
            try:
                return run(batch, *rest, **kwargs)
            except RuntimeError as error:
                # evaluation steps are not analyzed in advance; one may ask for gradients of a tensor of another stage
                if "appears to not have been used in the graph" not in str(error):
                    raise
                raise RuntimeError(
                    "the step computes gradients w.r.t. a tensor of another pipeline stage; compute them w.r.t. the "
                    "last block's output, or use ZeroStrategy, which divides any model"
                ) from error

        parts = self._microbatches(batch)
        sizes = microbatches.part_sizes(microbatches.samples_in(batch, self._dims) or 1, len(parts))
        self._stages.draws.begin(self._context.index)
        self._stages.attributes = {}
        work = self._execute(step, batch, parts, sizes, torch.is_grad_enabled())
        last = self._shared(work)
        self._stages.draws.end(last.draws)
        self._stages.set_attributes(last.attributes)
        if last.pair is not None:
            self._measure(step, batch, sizes, last.pair)
        records.replay(last.records)
        if new := [name for name in last.unclear if name not in self._told]:
            self._told.update(new)
            warn(
                f"In a pipeline, the step's output {', '.join(new)} differs between microbatches. Rows of samples are "
                "joined and single floating-point numbers averaged by samples; other tensors and integers are "
                "averaged, too, and of other values the first is taken. Return a row for each sample instead, or log "
                "counts by self.log(..., reduce_fx='sum')"
            )
        loss = loss_of(last.output)
        if not work.training or loss is None:
            return cast(T, last.output)
        applying = self._with_precomputed_grads(loss, work, self._context.scale / (last.unit or 1.0))
        return cast(T, _with_loss(last.output, records.normalize_loss(applying)))

    # ---------------------------------------------------------------- before

    def _microbatches(self, batch: Any) -> list[Any]:
        """Split a batch into microbatches.

        If earlier batches could be split, one that cannot is a single microbatch, e.g. when one of several loaders is
        exhausted. Not if ranks communicate within the forward: they need equal numbers of microbatches.

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

    def _execute(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        parts: Sequence[Any],
        sizes: Sequence[int],
        training: bool = False,
    ) -> BatchWork:
        """Run the schedule on `parts` of a batch, with `sizes` samples each. Collective over the pipeline."""
        context, divided, count = self._context, self._divided, len(parts)
        whole = self._over_batch or self._schedule.microbatches == 1 or (count == 1 and context.alone)
        parameters = {name: cast(nn.Parameter, p.owner._parameters[p.key]) for name, p in self._parameters.items()}
        with torch._C.DisableTorchFunctionSubclass():  # does not wait for shards that are being gathered
            differentiable = {name: p for name, p in parameters.items() if has_gradients(p)}
        gradients = {
            stage: Gradients({name: p for name, p in differentiable.items() if stage in self._parameters[name].stages})
            for stage in self._here
        }
        over_batch, unit, divisions = self._over_batch, divided.targets, divided.context.divisions
        work = BatchWork(step, batch, parts, sizes, context, over_batch, whole, unit, divisions, gradients, training)
        schedule = self._schedule.only(count) if count < self._schedule.microbatches else self._schedule
        with self._divided.tree.in_steps():  # the step may iterate over all parameters
            Executor(self._stages, self._p2p, work).run(schedule.with_communication[self._rank])
        return work

    # ---------------------------------------------------------------- after

    def _measure(self, step: Callable[[Any], Any], batch: Any, sizes: Sequence[int], pair: tuple[int, int]) -> None:
        """Measure the loss of some samples of two microbatches, as one batch and as two. Collective over all ranks.

        Raises:
            ValueError: on all ranks, if the two losses differ on one of them, or if the step changes parameters.
        """
        works = list[BatchWork]()
        # the first samples of both microbatches
        counts = [min(sizes[number], most) for number, most in zip(pair, probe.MOST, strict=True)]
        starts = [sum(sizes[:number]) for number in pair]
        rows = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
        with (
            self._context.silent() as writes,
            self._stages.measured(),
            probe.ConstantDraws(),  # type: ignore[no-untyped-call]
        ):
            # as one batch of both slices, then as two microbatches of one slice each
            both = [([rows], [sum(counts)]), ([[part] for part in rows], counts)]
            for selections, numbers in both if pair[0] != pair[1] else ():
                parts = [map_tensors(Tensor.clone, microbatches.select(batch, s, self._dims)) for s in selections]
                works.append(self._execute(step, microbatches.select(batch, rows, self._dims), parts, numbers))
        assert self._pending is not None
        pending = self._pending
        local_change = None if writes is None else writes.kept_by(self._divided.model, 2 * self._over_batch)
        changes = [
            broadcast_object(local_change, rank, self._group, self._device) for rank in range(self._group.size())
        ]
        changed = next((change for change in changes if change is not None), None)

        def compare() -> LossComparison | None:
            local = probe.NOTHING
            losses = [[loss_of(work.outputs[number]) for number in range(len(work.sizes))] for work in works]
            if works and not any(loss is None for of_work in losses for loss in of_work):
                (full,), of_parts = [[float(loss) for loss in of_work if loss is not None] for of_work in losses]
                shares, *_ = works[1].shares()
                combined = sum(loss * share for loss, share in zip(of_parts, shares, strict=True))
                unlike = len(shares) > 1 and abs(shares[0] - counts[0] / sum(counts)) > 1e-6
                local = LossComparison(
                    counts, full, combined, unlike, probe.tolerance(self._divided.model, self._device)
                )
            return pending.agree(local)

        mismatch = compute_on_one_rank(compare, "what was measured of a loss", self._last, self._group, self._device)
        if changed is not None:
            raise ValueError(
                f"In a pipeline, the step changes {changed} in place. Each microbatch would do so, and code after the "
                "blocks runs on the last stage only. Make such changes (averages, noise, clamping) in hooks like "
                "on_train_batch_start and on_train_batch_end, or use ZeroStrategy"
            )
        if mismatch is not None:
            raise ValueError(f"In a pipeline, {mismatch}: {probe.REMEDIES[self._over_batch]}")

    def _shared(self, work: BatchWork) -> BatchResults:
        """Merge the results of microbatches on the last stage and broadcast them. Collective over the pipeline."""

        def merge() -> BatchResults:
            numbers = range(len(work.sizes))
            outputs = [work.outputs[number] for number in numbers]
            missing = [number for number, output in enumerate(outputs) if loss_of(output) is None]
            if work.training and 0 < len(missing) < len(outputs):
                raise ValueError(
                    f"training_step returned no loss for microbatches {missing} of {len(outputs)}; a pipeline skips "
                    "only full batches: return their loss times zero, as Lightning takes no None on several ranks"
                )
            shares, unit, targets = work.shares()
            means = {number: work.means_of(number) for number in work.outputs}  # in the order in which they ran
            averaged = [[*means[number], *work.multiples[number]] for number in numbers]
            merged, unclear = microbatches.merge(outputs, work.sizes, shares, averaged)
            if work.training and not missing:
                if self._pending is not None:
                    work.require_same_weighting(shares)
                # losses are averaged with the weights that their gradients have: shares, or samples
                losses = [loss for output in outputs if (loss := loss_of(output)) is not None]
                by_shares = all(is_among(loss, means[number]) for number, loss in enumerate(losses))
                loss = microbatches.weighted_mean(losses, shares if by_shares else work.sizes)
                merged = _with_loss(merged, loss)
            pair = None
            if work.training and self._pending is not None:
                total = sum(work.part_sizes)
                by_samples = [size / total for size in work.part_sizes]
                pair = self._pending.pair(work.part_sizes, by_samples if self._over_batch else shares)
            collected = self._context.records.collect([*means.values()], targets)
            rng_states, attributes = self._stages.draws.left, self._stages.attributes
            return BatchResults(map_tensors(Tensor.cpu, merged), unclear, collected, unit, rng_states, pair, attributes)

        what = "what a step returned, logged or keeps on the module"
        last = compute_on_one_rank(merge, what, self._last, self._group, self._device)
        return last._replace(output=map_tensors(lambda tensor: tensor.to(self._device), last.output))

    def _with_precomputed_grads(self, loss: Tensor, work: BatchWork, scale: float) -> Tensor:
        """Return the loss, whose backward applies the gradients. Collective over ranks that share parameters."""
        sums, leaves = dict[str, Tensor | None](), dict[str, Tensor]()
        for gradients in work.gradients.values():
            for name, leaf, gradient in gradients.take():
                leaves[name], previous = leaf, sums.get(name)
                sums[name] = previous if gradient is None else gradient if previous is None else previous + gradient
        shared: dict[Tie, list[Tensor]] = {}
        for name in sorted(sums):
            ranks = self._parameters[name].ranks
            if len(ranks) > 1:
                gradient = sums[name]
                sums[name] = summand = torch.zeros_like(leaves[name]) if gradient is None else gradient
                shared.setdefault(ranks, []).append(summand)
        # Sum them in place over the ranks that hold their parameters, in the same order on all ranks, so that the sums
        # are equal to the last bit. Ranks communicate in one order, because all sort by holders and names.
        for holders, tensors in sorted(shared.items()):
            local = torch.cat([tensor.reshape(-1) for tensor in tensors])
            received = {holder: torch.empty_like(local) for holder in holders if holder != self._rank}
            self._p2p.channel.exchange(local, received)
            received[self._rank] = local
            summed = sum((received[holder] for holder in holders[1:]), received[holders[0]])
            for tensor, values in zip(tensors, torch.split(summed, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(values.view_as(tensor))
        dummy = torch.zeros((), requires_grad=True)  # a stage may have no trainable parameter
        # parameters without gradients are left out: autograd would call their hooks with None
        applied = {name: gradient for name, gradient in sums.items() if gradient is not None}
        result: Tensor = ApplyPrecomputedGrads.apply(  # type: ignore[no-untyped-call]
            loss, list(applied.values()), scale, dummy, *(leaves[name] for name in applied)
        )
        return result


class _StageParameter(NamedTuple):
    """A parameter of this rank. It is found by its place, because techniques may replace it in a step."""

    owner: nn.Module
    key: str  # in `owner._parameters`
    stages: frozenset[int]  # that read it
    ranks: Tie  # that hold these stages


def _with_loss(output: Any, loss: Tensor) -> Any:
    return {**output, "loss": loss} if isinstance(output, dict) else loss
