"""Pipeline parallel as a technique: layers on different ranks, through which microbatches pass.

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
from lightning_parallel.techniques.pipeline_parallel.step import PipelineDivision
from lightning_parallel.techniques.pipeline_parallel.trace import BlocksMissingError, trace_step
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.tools import stage_tree
from lightning_parallel.techniques.tools.microbatches import samples_in, split
from lightning_parallel.techniques.tools.replaced_parameters import places
from lightning_parallel.techniques.tools.shards import copy_user_attributes
from lightning_parallel.techniques.tools.user_warnings import warn
from lightning_parallel.values import tensors_of

LossOver = Literal["auto", "microbatches", "batch"]


@dataclass(frozen=True)
class PipelineParallel(Technique):
    """Cut the model at its blocks into stages on different ranks: `PipelineParallel(4)`.

    Args:
        size: number of ranks; "auto" takes the ranks that no other technique claims.
        schedule: a name (gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv), or the path of a
            CSV file.
        microbatches: number of parts into which a rank's batch is split; "auto" takes the number of the CSV file, else
            four per rank, but at most the number of samples. A batch with fewer samples than microbatches is split into
            single samples.
        stages_per_rank: number of stages per rank, for schedules that support several; None takes their default.
        split: number of blocks of each stage, in the order of the model, e.g. (3, 5); None balances the stages by their
            FLOPs, and does not cut between blocks that share values which no module returns.
        loss_over: "auto" runs the code after the blocks for each microbatch and averages the losses over targets or
            samples; in the first batch, it checks on a few samples that this gives the loss of the batch.
            "microbatches" does the same without the check. "batch" runs the code after the blocks once for the full
            batch, for losses that compare samples: all forwards run first, so ranks store all activations.

    Raises:
        ValueError: the schedule does not support the numbers; in the first batch, the loss is no mean over samples.
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
                    "stage, e.g. (3, 5)"
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

    def analyze(self, model: nn.Module, context: PartitionContext) -> Analysis | None:
        """Analyze one step on a sample batch, see `trace_step`. Return None if the pipeline has one rank only."""
        ranks = context.mesh.sizes["pp"]
        if ranks == 1:
            return None
        sample = context.sample()
        blocks, dims = context.plan.require_blocks(model, repr(self)), context.plan.batch_dims
        running = dict[str, nn.Module]()
        try:
            with sample.unchanged():
                trace = trace_step(model, blocks, sample.run, sample.device)
        except BlocksMissingError as error:
            running = running_blocks(context.plan, model, error.called) if context.plan.inferred else {}
            if not running:
                raise
        if running:  # an inferred plan is retried with the blocks that ran
            used, unused = (sorted(set(map(starred, names))) for names in (running, set(blocks) - set(running)))
            warn(
                f"The pipeline is cut at {', '.join(used)}: the analyzed step runs without {', '.join(unused)}. "
                "Where other steps run them, use ZeroStrategy, which divides any model"
            )
            with sample.unchanged():
                trace = trace_step(model, running, sample.run, sample.device)
        size = samples_in(sample.batch, dims)
        count = self._count(ranks, size)
        schedule = make_schedule(self.schedule, ranks, count, self.stages_per_rank)
        over_batch = self.loss_over == "batch" and count > 1
        cut(trace, schedule.stages, self.split, over_batch)  # fail now if model or batch cannot be cut
        split(sample.batch, min(count, size or count), dims)
        names = [name for pattern in context.plan.whole_batch for name, _ in matching(model, pattern)]
        if names and count > 1 and self.loss_over == "auto":
            raise ValueError(
                f"ParallelPlan(whole_batch={context.plan.whole_batch!r}) names {', '.join(names)}, but a pipeline runs "
                "the code after the blocks for each microbatch; pass PipelineParallel(loss_over='batch'), which runs "
                "it once for the batch, or leave whole_batch out"
            )
        # estimate: elements of the largest integer tensor, e.g. labels of tokens or pixels
        targets = [tensor.numel() for tensor in tensors_of(sample.batch) if not tensor.is_floating_point()]
        return Analysis(trace, count, max([size or 1, *targets]), over_batch)

    def _count(self, ranks: int, samples: int | None) -> int:
        """Return the number of microbatches, and decide it for "auto"."""
        if self.microbatches != "auto":
            return self.microbatches
        if is_file(self.schedule):
            return read_csv(self.schedule).microbatches
        if samples is not None and samples < ranks:
            warn(
                f"A batch of {samples} gives {samples} microbatches to {ranks} ranks of a pipeline, which mostly wait "
                f"for each other; use batches of {4 * ranks} samples or more to keep them busy"
            )
        preferred = 4 * ranks if samples is None else min(4 * ranks, max(1, samples))
        return nearest_legal_microbatches(self.schedule, ranks, preferred)[0]

    def divide(self, model: nn.Module, context: PartitionContext, analysis: Analysis | None) -> Division:
        """Remove from the model what other stages hold; returns the division that runs the schedule."""
        if analysis is None:
            return Division(model)
        mesh = context.mesh
        schedule = make_schedule(self.schedule, mesh.sizes["pp"], analysis.microbatches, self.stages_per_rank)
        # Some modules, e.g. routers, cast parameters in their first forward. A stage runs only some modules: cast now.
        for name, dtype in analysis.step.casts.items():
            p = model.get_parameter(name)
            if p.is_meta:  # its initialization is recorded for its dtype, so it is replaced instead of changed
                made = nn.Parameter(p.to(dtype), p.requires_grad)
                copy_user_attributes(made, p)
                for place in [place for place, each in places(model).items() if each is p]:
                    place.put(made)
            else:
                p.data = p.data.to(dtype)
        layout = cut(analysis.step, schedule.stages, self.split, analysis.over_batch)
        schedule = schedule.with_loss_stage() if analysis.over_batch else schedule
        local_stages = schedule.stages_of(mesh["pp"].get_local_rank())
        for name, parameter in model.named_parameters():
            if len({*map(schedule.rank_of, layout.stages_of(name))}) > 1:
                vars(parameter)[stage_tree.SHARED] = True
        stages = {name: sorted(layout.stages_of(name)) for name, _ in model.named_parameters(remove_duplicate=False)}
        names = {  # FQN -> name in messages, of tensors that no stage of this rank holds
            name: f"{name} (of stage {', '.join(map(str, holders))})"
            for name, holders in stages.items()
            if not set(local_stages) & set(holders)
        }
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if not set(local_stages) & layout.stages_of_buffer(name, buffer.numel()):
                names[name] = name
        tree = stage_tree.StageTree(model, names, mesh.device)
        probes = self.loss_over != "microbatches" and analysis.microbatches > 1
        return PipelineDivision(model, context, layout, schedule, tree, analysis.targets, analysis.over_batch, probes)


@dataclass(frozen=True)
class Analysis:
    """Result of `PipelineParallel.analyze`: plain data, the same on all ranks."""

    step: StepTrace  # analysis of the sample step
    microbatches: int  # number of parts into which a batch is split
    targets: int  # approximate number of targets in a batch; it affects only the scale of intermediate gradients
    over_batch: bool  # whether code after the blocks runs once for the full batch
