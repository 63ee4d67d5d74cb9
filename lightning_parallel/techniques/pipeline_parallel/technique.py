"""Pipeline parallel as a technique: layers on different ranks, microbatches on their way through them.

Sources: Y. Huang et al., GPipe, NeurIPS 2019; D. Narayanan et al., Efficient Large-Scale Language Model Training on GPU
Clusters, SC 2021; P. Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal, get_args

from torch import nn

from lightning_parallel.arguments import one_of, whole_number
from lightning_parallel.mesh import Axis, Size
from lightning_parallel.plan.find import running_blocks
from lightning_parallel.plan.plan import matching, starred
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.pipeline_parallel.layout import StepTrace, cut
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import (
    check_stages_per_rank,
    is_file,
    make_schedule,
    nearest_legal_microbatches,
    read_csv,
)
from lightning_parallel.techniques.pipeline_parallel.step import DividedLayers
from lightning_parallel.techniques.pipeline_parallel.trace import BlocksMissingError, trace_step
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.techniques.tools.microbatches import samples_in, split
from lightning_parallel.techniques.tools.telling import warn
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
        loss_over: "auto" computes what follows the blocks for each microbatch, and the loss of the batch is the mean
            over targets or samples; in the first batch a few samples show whether it is. "microbatches" does the same
            without that check. "batch" computes what follows the blocks once for all microbatches, for losses that
            compare samples: all forwards come first, and a rank keeps the activations of all microbatches.

    Raises:
        ValueError: numbers that break the schedule's rule; (in the first batch) a loss that is no mean over samples.
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
            counts = tuple(self.split) if isinstance(self.split, Sequence) else ()
            if not counts or not all(type(count) is int and count >= 1 for count in counts):
                raise ValueError(
                    f"PipelineParallel(split={self.split!r}): split is a positive whole number of blocks for each "
                    "stage, as (3, 5)"
                )
            object.__setattr__(self, "split", counts)
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
        schedule = read_csv(self.schedule) if is_file(self.schedule) else make_schedule(self.schedule, 2, 4)
        return Traits(splits_backward=schedule.splits_backward, replaces_tensors=True)

    def analyze(self, model: nn.Module, ground: PartitionContext) -> Analysis | None:
        """Looks at one step, to know what runs before and after the blocks, and how much work it is."""
        ranks = ground.mesh.sizes["pp"]
        if ranks == 1:
            return None
        one = ground.sample()
        blocks, dims = ground.plan.require_blocks(model, repr(self)), ground.plan.batch_dims
        seen = None
        try:
            with one.unchanged():
                seen = trace_step(model, blocks, one.run, one.device)
        except BlocksMissingError as error:  # of an inferred plan, the lists of layers are blocks that run in the step
            running = running_blocks(ground.plan, model, error.called) if ground.plan.inferred else {}
            if not running:
                raise
        if seen is None:
            cut_at, left = (sorted(set(map(starred, names))) for names in (running, set(blocks) - set(running)))
            warn(
                f"The pipeline is cut at {', '.join(cut_at)}: the analyzed step runs without {', '.join(left)}. "
                "Where other steps run them, use ZeroStrategy, which divides any model"
            )
            with one.unchanged():
                seen = trace_step(model, running, one.run, one.device)
        size = samples_in(one.batch, dims)
        count = self._count(ranks, size)
        schedule = make_schedule(self.schedule, ranks, count, self.stages_per_rank)
        over_batch = self.loss_over == "batch" and count > 1
        cut(seen, schedule.stages, self.split, over_batch)  # a model that cannot be cut, or a batch, is refused here
        split(one.batch, min(count, size or count), dims)
        whole = [name for pattern in ground.plan.whole_batch for name, _ in matching(model, pattern)]
        if whole and count > 1 and self.loss_over == "auto":
            raise ValueError(
                f"ParallelPlan(whole_batch={ground.plan.whole_batch!r}) names {', '.join(whole)}, but a pipeline "
                "computes what follows the blocks for each microbatch; pass PipelineParallel(loss_over='batch'), which "
                "computes it once for the batch, or leave whole_batch out"
            )
        # as many as the largest tensor of integers has elements: labels of tokens or pixels
        targets = [tensor.numel() for tensor in tensors_of(one.batch) if not tensor.is_floating_point()]
        return Analysis(seen, count, max([size or 1, *targets]), over_batch)

    def _count(self, ranks: int, samples: int | None) -> int:
        """How many microbatches, where "auto" is to decide."""
        if self.microbatches != "auto":
            return self.microbatches
        if is_file(self.schedule):
            return read_csv(self.schedule).microbatches
        if samples is not None and samples < ranks:
            warn(
                f"A batch of {samples} gives {samples} microbatches to {ranks} ranks of a pipeline, which mostly wait "
                f"for each other; batches of {4 * ranks} samples or more keep them at work"
            )
        wanted = 4 * ranks if samples is None else min(4 * ranks, max(1, samples))
        return nearest_legal_microbatches(self.schedule, ranks, wanted)[0]

    def divide(self, model: nn.Module, ground: PartitionContext, seen: Analysis | None) -> Division:
        """Keeps what this rank's stages need."""
        if seen is None:
            return Division(model)
        mesh = ground.mesh
        schedule = make_schedule(self.schedule, mesh.sizes["pp"], seen.microbatches, self.stages_per_rank)
        # Cast at once what modules cast in their first forward, as some routers do: a stage runs a part of them only.
        for name, dtype in seen.step.casts.items():
            own = model.get_parameter(name)
            if own.is_meta:  # it stays what its values are recorded for: another one takes its place
                elsewhere.put_in_place(model, own, nn.Parameter(own.to(dtype), own.requires_grad))
            else:
                own.data = own.data.to(dtype)
        made = cut(seen.step, schedule.stages, self.split, seen.over_batch)
        schedule = schedule.with_loss_stage() if seen.over_batch else schedule
        here = schedule.stages_of(mesh["pp"].get_local_rank())
        for name, parameter in model.named_parameters():
            if len({*map(schedule.rank_of, made.stages_of(name))}) > 1:
                vars(parameter)[elsewhere.SHARED] = True
        stages = {name: sorted(made.stages_of(name)) for name, _ in model.named_parameters(remove_duplicate=False)}
        names = {  # of what no stage of this rank holds
            name: f"{name} (of stage {', '.join(map(str, own))})"
            for name, own in stages.items()
            if not set(here) & set(own)
        }
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if not set(here) & made.stages_of_buffer(name, buffer.numel()):
                names[name] = name
        tree = elsewhere.StageTree(model, names, mesh.device)
        elsewhere.mark_emptied(model)
        probes = self.loss_over != "microbatches" and seen.microbatches > 1
        return DividedLayers(model, ground, made, schedule, tree, seen.targets, seen.over_batch, probes)


@dataclass(frozen=True)
class Analysis:
    """What a pipeline has to know of a model."""

    step: StepTrace  # what a step of it showed
    microbatches: int  # into how many parts a batch is divided
    targets: int  # about how many there are in a batch; for the size of gradients only
    over_batch: bool  # whether what follows the blocks runs once for the batch
