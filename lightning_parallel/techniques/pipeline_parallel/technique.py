"""Pipeline parallel as a technique: layers on different ranks, microbatches on their way through them.

Sources: Y. Huang et al., GPipe, NeurIPS 2019; D. Narayanan et al., Efficient Large-Scale Language Model Training on GPU
Clusters, SC 2021; P. Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from lightning_parallel.arguments import whole_number
from lightning_parallel.mesh import Axis, ParallelMesh, Size
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.plan.find import running_blocks
from lightning_parallel.plan.plan import starred
from lightning_parallel.techniques.division import Division, Ground, Sample
from lightning_parallel.techniques.observed.apart import require_apart
from lightning_parallel.techniques.observed.positions import Traversal
from lightning_parallel.techniques.observed.recorder import traverse
from lightning_parallel.techniques.observed.refusals import BlocksMissingError
from lightning_parallel.techniques.pipeline_parallel.cut import Cut, cut, names_elsewhere
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
from lightning_parallel.techniques.tools.microbatches import split
from lightning_parallel.techniques.tools.telling import warn


@dataclass(frozen=True)
class PipelineParallel(Technique):
    """Cuts the model at its blocks into stages on different ranks: `PipelineParallel(4)`.

    Args:
        size: number of ranks; "auto" takes the ranks that no other technique claims.
        schedule: a name (gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv, dualpipev), or the
            path of a CSV file.
        microbatches: into how many parts a rank's batch is divided; "auto" takes the number that a CSV file has, else
            four for each rank, or as many as the batch has samples. Batches with fewer samples than that have a
            microbatch for each.
        stages_per_rank: for schedules that give each rank several stages; None takes the schedule's own number.
        split: how many blocks each stage has, in the order of the model; None balances the stages by their work.

    Raises:
        ValueError: numbers that break the schedule's rule; (when training starts) samples of a batch that meet.
    """

    size: Size = "auto"
    _: KW_ONLY
    schedule: str = "1f1b"
    microbatches: int | Literal["auto"] = "auto"
    stages_per_rank: int | None = None
    split: tuple[int, ...] | None = None

    phase: ClassVar[Phase] = Phase.SPLIT

    def __post_init__(self) -> None:
        whole_number("PipelineParallel", "microbatches", self.microbatches, "auto")
        whole_number("PipelineParallel", "stages_per_rank", self.stages_per_rank, None)
        if self.split is not None:
            object.__setattr__(self, "split", _block_counts(self.split))
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
        return Traits(splits_backward=make_schedule(self.schedule, *sizes).splits_backward)

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
        split(one.batch, min(count, one.size or count))
        if count > 1:
            require_apart(model, one, count, seen.complete)
        return Seen(seen, count)

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
        made = cut(seen.step, schedule.stages, self.split)
        here = schedule.stages_of(mesh["pp"].get_local_rank())
        names = set(names_elsewhere(model, made, here))
        direct = [parameter for name, parameter in model.named_parameters() if name in made.seen.direct]
        direct_ids = {id(parameter) for parameter in direct}
        zeros = elsewhere.without_memory(mesh.device)
        elsewhere.hide(model, names, lambda t: zeros(t) if id(t) in direct_ids else _shape_of(t))
        elsewhere.mark_emptied(model)
        return DividedLayers(model, mesh, made, schedule)


@dataclass(frozen=True)
class Seen:
    """What a pipeline has to know of a model.

    Attributes:
        step: what a step of it showed.
        microbatches: into how many parts a batch is divided.
    """

    step: Traversal
    microbatches: int


@dataclass(eq=False)
class DividedLayers(Division):
    """A model of which this rank holds some stages."""

    mesh: ParallelMesh
    made: Cut
    schedule: Schedule

    def step(self, step: Step) -> Step:
        """Runs the schedule in every step."""
        return PipelineStep(step, self.model, self.made, self.schedule, self.mesh["pp"].get_group(), self.mesh.device)


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
        return traverse(model, blocks, one.run, one.device)
    except BlocksMissingError as error:
        running = running_blocks(plan, model, error.called) if plan.inferred else {}
        if not running:
            raise
    cut_at, left = (sorted(set(map(starred, names))) for names in (running, set(blocks) - set(running)))
    warn(
        f"The pipeline is cut at {', '.join(cut_at)}: the step that was looked at runs without {', '.join(left)}. "
        "Where other steps run them, use ZeroStrategy, which divides any model"
    )
    return traverse(model, running, one.run, one.device)


def _cast(model: nn.Module, casts: Mapping[str, torch.dtype]) -> None:
    """Casts at once what modules cast in their first forward, as some routers do: a stage runs a part of them only."""
    for name, dtype in casts.items():
        parameter = model.get_parameter(name)
        if not parameter.is_meta:
            parameter.data = parameter.data.to(dtype)
        else:  # it stays what its values are recorded for: another one takes its place
            elsewhere.put_in_place(model, parameter, nn.Parameter(parameter.to(dtype), parameter.requires_grad))


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta").detach()
