"""ZeRO: data parallelism whose optimizer states, gradients and parameters are sharded over the ranks.

Source: S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

from torch import nn

from lightning_parallel.arguments import one_of, true_or_false
from lightning_parallel.mesh import Axis, Size
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.gradients.buckets import average_gradients
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.tools.shards import cannot_shard_rows
from lightning_parallel.techniques.zero.sharded.parameters import shard_parameters
from lightning_parallel.techniques.zero.sharded.root import Root
from lightning_parallel.techniques.zero.sharded.step import ShardedParametersStep
from lightning_parallel.techniques.zero.states import ShardedStatesStep


@dataclass(frozen=True)
class Zero(Technique):
    """Shards what data parallel replicates: `Zero(8)`; `Zero(4, replicate=2)` is hybrid sharding (HSDP).

    Args:
        size: number of ranks over which one copy is sharded; "auto" takes the ranks that no other technique claims.
        stage: 1 shards optimizer states, 2 also gradients, 3 also parameters.
        replicate: number of sharded copies; "auto" makes as many as there are ranks for.
        offload: whether optimizer states (in stage 3 also the shards of parameters) are kept in host memory.

    Raises:
        ValueError: `stage` is not 1, 2 or 3, or `offload` is not a bool.
    """

    size: Size = "auto"
    _: KW_ONLY
    stage: Literal[1, 2, 3] = 3
    replicate: Size = 1
    offload: bool = False

    phase: ClassVar[Phase] = Phase.SHARD

    def __post_init__(self) -> None:
        one_of("Zero", "stage", self.stage, (1, 2, 3))
        true_or_false("Zero", offload=self.offload)

    @property
    def axes(self) -> Mapping[Axis, Size]:
        """See `Technique.axes`."""
        return {"dp_replicate": self.replicate, "dp_shard": self.size}

    @property
    def traits(self) -> Traits:
        """See `Technique.traits`."""
        sharded = self.stage == 3
        return Traits(
            shards_on_host=self.offload and sharded,
            averages_gradients=True,
            replaces_tensors=sharded,
            replaces_parameters=sharded,
            acts_on_one_rank=True,
        )

    def divide(self, model: nn.Module, context: PartitionContext, analysis: None) -> Division:
        """Shard the parameters in stage 3, where the root becomes the model; stages 1 and 2 only change the step."""
        if self.stage == 3:
            return ShardedParameters(shard_parameters(model, context.mesh, context.plan, self.offload), context)
        return ShardedStates(model, context, self)


@dataclass(eq=False)
class ShardedParameters(Division):
    """Model with sharded parameters (stage 3)."""

    model: Root
    context: PartitionContext

    def step(self, step: Step) -> Step:
        """Run the step through the root, and average the gradients of parameters that cannot be sharded."""
        self.model.divisions = self.context.divisions
        step = ShardedParametersStep(step, self.model, self.context.mesh)
        return average_gradients(step, self.model.unsharded_params, self.context.mesh, late=True)


@dataclass(eq=False)
class ShardedStates(Division):
    """Model with full parameters, and sharded optimizer states (stage 1) or also gradients (stage 2)."""

    context: PartitionContext
    technique: Zero

    def step(self, step: Step) -> Step:
        """Reduce-scatter gradients; all-reduce those of parameters that have no rows to shard, such as scalars."""
        parameters, mesh = list(self.model.parameters()), self.context.mesh
        rows = [p for p in parameters if not cannot_shard_rows(p)]
        zero = self.technique
        # a block waits for its parameters when its forward begins; a pipeline enters its blocks many times in a step
        blocks = [] if mesh.sizes["pp"] > 1 else list(self.context.plan.find_blocks(self.model).values())
        step = ShardedStatesStep(step, rows, mesh, zero.stage, zero.offload, self.model, blocks)
        return average_gradients(step, [p for p in parameters if cannot_shard_rows(p)], mesh, late=True)
