"""Pipeline parallel as a technique: layers on different ranks, microbatches on their way through them.

Sources: Y. Huang et al., GPipe, NeurIPS 2019; D. Narayanan et al., Efficient Large-Scale Language Model Training on GPU
Clusters, SC 2021; P. Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import ClassVar, Literal, get_args

import torch
from torch import nn

from lightning_parallel.arguments import one_of, whole_number
from lightning_parallel.mesh import Axis, ParallelMesh, Size
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.plan.find import running_blocks
from lightning_parallel.plan.plan import matching, starred
from lightning_parallel.techniques.division import Division, Ground, Sample
from lightning_parallel.techniques.observed.positions import Traversal
from lightning_parallel.techniques.observed.recorder import traverse
from lightning_parallel.techniques.observed.refusals import BlocksMissingError
from lightning_parallel.techniques.observed.samples.apart import Meeting, counts_apart, meetings
from lightning_parallel.techniques.pipeline_parallel.cut import Cut, cut, names_elsewhere
from lightning_parallel.techniques.pipeline_parallel.joined import Dims, sample_dims
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import (
    Schedule,
    check_stages_per_rank,
    file_sizes,
    is_file,
    make_schedule,
    nearest_legal_microbatches,
)
from lightning_parallel.techniques.pipeline_parallel.step import PipelineStep
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.techniques.tools.microbatches import again, split
from lightning_parallel.techniques.tools.telling import inform, warn
from lightning_parallel.values import tensors_of

LossOver = Literal["auto", "microbatches", "batch"]


@dataclass(frozen=True)
class PipelineParallel(Technique):
    """Cuts the model at its blocks into stages on different ranks: `PipelineParallel(4)`.

    Args:
        size: number of ranks; "auto" takes the ranks that no other technique claims.
        schedule: a name (gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv), or the path of a
            CSV file.
        microbatches: into how many parts a rank's batch is divided; "auto" takes the number that a CSV file has, else
            four for each rank, or as many as the batch has samples. Batches with fewer samples than that have a
            microbatch for each.
        stages_per_rank: for schedules that give each rank several stages; None takes the schedule's own number.
        split: how many blocks each stage has, in the order of the model; None balances the stages by their work, and
            leaves blocks together that share values which no module returns.
        loss_over: "microbatches" computes what follows the blocks for each microbatch as soon as it is there, and the
            loss is the mean of theirs; "batch" computes it once for all of them, so that a rank keeps the activations
            of all microbatches, as under gpipe; "auto" takes the batch where samples meet after the blocks, as in a
            contrastive loss or one that balances experts.

    Raises:
        ValueError: numbers that break the schedule's rule; (when training starts) samples of a batch that meet.
    """

    size: Size = "auto"
    _: KW_ONLY
    schedule: str = "1f1b"
    microbatches: int | Literal["auto"] = "auto"
    stages_per_rank: int | None = None
    split: tuple[int, ...] | None = None
    loss_over: LossOver = "auto"

    phase: ClassVar[Phase] = Phase.SPLIT

    def __post_init__(self) -> None:
        whole_number("PipelineParallel", "microbatches", self.microbatches, "auto")
        whole_number("PipelineParallel", "stages_per_rank", self.stages_per_rank, None)
        if self.split is not None:
            object.__setattr__(self, "split", _block_counts(self.split))
        one_of("PipelineParallel", "loss_over", self.loss_over, get_args(LossOver))
        check_stages_per_rank(self.schedule, self.stages_per_rank)
        if self.microbatches != "auto" and isinstance(self.size, int) and self.size > 0:
            make_schedule(self.schedule, self.size, self.microbatches, self.stages_per_rank)

    @property
    def axes(self) -> Mapping[Axis, Size]:
        """See `Technique.axes`."""
        return {"pp": self.size}

    @property
    def traits(self) -> Traits:
        """See `Technique.traits`."""
        sizes = file_sizes(self.schedule) if is_file(self.schedule) else (2, 4)
        splits_backward = make_schedule(self.schedule, *sizes).splits_backward
        divides = self.microbatches != 1
        return Traits(splits_backward=splits_backward, divides_batches=divides, replaces_tensors=True)

    def look(self, model: nn.Module, ground: Ground) -> Seen | None:
        """Looks at one step, to know what runs before and after the blocks, and how much work it is."""
        ranks = ground.mesh.sizes["pp"]
        if ranks == 1:
            return None
        one = ground.sample()
        seen = _traversed(model, ground.plan, ground.plan.require_blocks(model, repr(self)), one)
        count = self._count(ranks, one.size)
        schedule = make_schedule(self.schedule, ranks, count, self.stages_per_rank)
        cut(seen, schedule.stages, self.split)  # a model that cannot be cut, or a batch, is refused here
        split(one.batch, min(count, one.size or count), one.layout)
        targets, last = _targets(one), model.get_submodule(seen.blocks[-1])
        if count == 1:
            return Seen(seen, count, targets, None, ground.mesh.data.size() > 1 and counts_apart(model, one, last))
        dims = self._dims(model, ground, one, Seen(seen, count, 1), schedule.stages)
        return Seen(seen, count, targets, dims, dims is not None)

    def _dims(self, model: nn.Module, ground: Ground, one: Sample, seen: Seen, stages: int) -> Dims | None:
        """Where samples are in what goes to the loss, if it is computed over the batch; None for microbatches."""
        blocks = {name: model.get_submodule(name) for name in seen.step.blocks}
        named = [] if self.loss_over == "microbatches" else _named_after(model, ground.plan, seen.step)
        met = meetings(model, one, seen.microbatches, seen.step.complete, blocks[seen.step.blocks[-1]])
        solved = [] if self.loss_over == "microbatches" else solved_by_batch(met)
        for meeting in met:
            if meeting not in solved:
                meeting.refuse()
        if self.loss_over != "batch" and not named and not solved:
            return None
        try:
            cut(seen.step, stages, self.split, loss_stage=True)
            size = one.size or 1
            twice = replace(one, run=partial(one.run, again(one.batch, one.layout)))
            dims = sample_dims(seen.step, _seen(model, blocks, twice), (size, 2 * size))
        except (ValueError, RuntimeError) as error:
            if self.loss_over == "batch":
                raise ValueError(f"PipelineParallel(loss_over='batch') cannot be: {error}") from error
            for meeting in solved:
                meeting.refuse()
            return None
        _tell_loss_over_batch(solved, ground.mesh.data.size())
        return dims

    def _count(self, ranks: int, samples: int | None) -> int:
        """How many microbatches, where "auto" is to decide."""
        if self.microbatches != "auto":
            return self.microbatches
        if is_file(self.schedule):
            return file_sizes(self.schedule)[1]
        if samples is not None and samples < ranks:
            warn(
                f"A batch of {samples} gives {samples} microbatches to {ranks} ranks of a pipeline, which mostly wait "
                f"for each other; batches of {4 * ranks} samples or more keep them at work"
            )
        wanted = 4 * ranks if samples is None else min(4 * ranks, max(1, samples))
        return nearest_legal_microbatches(self.schedule, ranks, wanted)[0]

    def divide(self, model: nn.Module, ground: Ground, seen: Seen | None) -> Division:
        """Keeps what this rank's stages need."""
        if seen is None:
            return Division(model)
        mesh = ground.mesh
        schedule = make_schedule(self.schedule, mesh.sizes["pp"], seen.microbatches, self.stages_per_rank)
        _cast(model, seen.step.casts)
        made = cut(seen.step, schedule.stages, self.split, seen.dims is not None)
        schedule = schedule if seen.dims is None else schedule.with_loss_stage()
        here = schedule.stages_of(mesh["pp"].get_local_rank())
        elsewhere.mark_shared(model, lambda name: len({*map(schedule.rank_of, made.stages_of(name))}) > 1)
        names = set(names_elsewhere(model, made, here))
        elsewhere.hide(model, names, lambda tensor: elsewhere.StandIn(tensor, mesh.device))
        elsewhere.mark_emptied(model)
        return DividedLayers(model, mesh, made, schedule, seen.dims, seen.apart, seen.targets)


@dataclass(frozen=True)
class Seen:
    """What a pipeline has to know of a model.

    Attributes:
        step: what a step of it showed.
        microbatches: into how many parts a batch is divided.
        targets: about how many there are in a batch; for the size of gradients only.
        dims: where samples are in what goes to a loss over the whole batch; None for one over each microbatch.
        apart: whether means in a loss over the whole batch count apart, and not as a whole.
    """

    step: Traversal
    microbatches: int
    targets: int
    dims: Dims | None = None
    apart: bool = False


@dataclass(eq=False)
class DividedLayers(Division):
    """A model of which this rank holds some stages."""

    mesh: ParallelMesh
    made: Cut
    schedule: Schedule
    dims: Dims | None
    apart: bool
    targets: int

    @property
    def losses_over_batch(self) -> bool:
        """See `Division.losses_over_batch`."""
        return self.dims is not None or self.schedule.microbatches == 1

    def step(self, step: Step) -> Step:
        """Runs the schedule in every step."""
        group, device = self.mesh["pp"].get_group(), self.mesh.device
        return PipelineStep(
            step, self.model, self.made, self.schedule, self.dims, self.apart, self.targets, group, device
        )


def _named_after(model: nn.Module, plan: ParallelPlan, seen: Traversal) -> list[str]:
    """The modules that are to see the whole batch, and are called after the blocks.

    Raises:
        ValueError: one is called in blocks, or before them.
    """
    named = [name for pattern in plan.whole_batch for name, _ in matching(model, pattern)]
    for name in named:
        if min(seen.calls.get(name, {seen.end})) < seen.end:
            raise ValueError(
                f"ParallelPlan(whole_batch={plan.whole_batch!r}) names {name}, which is called before the last block "
                "has returned: in a pipeline that is once for each microbatch. Call it after the blocks, on what they "
                "return; or leave it out of the plan, and each microbatch counts by itself"
            )
    return [name for name in named if name in seen.calls]


def solved_by_batch(met: Sequence[Meeting]) -> list[Meeting]:
    """The meetings for which a loss over the batch is worth its price.

    Where samples meet in blocks too, the curve is not that of one device; then only what would be wrong is mended.
    """
    in_blocks = any(meeting.in_blocks for meeting in met)
    return [each for each in met if not each.in_blocks and (each.wrong or each.far or not in_blocks)]


def _tell_loss_over_batch(solved: Sequence[Meeting], readers: int) -> None:
    why = "; ".join(meeting.what for meeting in solved) or "as it is asked for"
    if readers > 1 and any(meeting.wrong for meeting in solved):
        warn(
            f"{why}. On {readers} ranks that read different samples each one's meet only its own, where one device "
            "would compare all: compare them in a module that the plan names, ParallelPlan(whole_batch='contrast')"
        )
    inform(
        f"What follows the blocks is computed once for the batch, not for each microbatch ({why}): all forwards come "
        "before the first backward, as under gpipe, and a rank keeps the activations of all its microbatches. "
        f"PipelineParallel(loss_over='microbatches') computes a loss for each"
    )


def _targets(one: Sample) -> int:
    whole = [tensor.numel() for tensor in tensors_of(one.batch) if not tensor.is_floating_point()]
    return max([one.size or 1, *whole])


def _block_counts(split: object) -> tuple[int, ...]:
    counts = tuple(split) if isinstance(split, Sequence) else ()
    if not counts or not all(type(count) is int and count >= 1 for count in counts):
        raise ValueError(
            f"PipelineParallel(split={split!r}): split is a positive whole number of blocks for each stage, as (3, 5)"
        )
    return counts


def _traversed(model: nn.Module, plan: ParallelPlan, blocks: dict[str, nn.Module], one: Sample) -> Traversal:
    """What a step shows; of an inferred plan, with those lists of layers for blocks that run in it."""
    try:
        return _seen(model, blocks, one)
    except BlocksMissingError as error:
        running = running_blocks(plan, model, error.called) if plan.inferred else {}
        if not running:
            raise
    cut_at, left = (sorted(set(map(starred, names))) for names in (running, set(blocks) - set(running)))
    warn(
        f"The pipeline is cut at {', '.join(cut_at)}: the step that was looked at runs without {', '.join(left)}. "
        "Where other steps run them, use ZeroStrategy, which divides any model"
    )
    return _seen(model, running, one)


def _seen(model: nn.Module, blocks: Mapping[str, nn.Module], one: Sample) -> Traversal:
    with one.unchanged():
        return traverse(model, blocks, one.run, one.device)


def _cast(model: nn.Module, casts: Mapping[str, torch.dtype]) -> None:
    """Casts at once what modules cast in their first forward, as some routers do: a stage runs a part of them only."""
    for name, dtype in casts.items():
        parameter = model.get_parameter(name)
        if not parameter.is_meta:
            parameter.data = parameter.data.to(dtype)
        else:  # it stays what its values are recorded for: another one takes its place
            elsewhere.put_in_place(model, parameter, nn.Parameter(parameter.to(dtype), parameter.requires_grad))
