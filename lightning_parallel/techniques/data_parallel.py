"""Data parallel: every rank holds the whole model and sees other samples; gradients are averaged.

Source: S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from torch import nn

from lightning_parallel.arguments import one_of
from lightning_parallel.mesh import Axis, ParallelMesh, Size
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.gradients.buckets import Compression, average_gradients
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.tools.holders import Replicas


@dataclass(frozen=True)
class DataParallel(Technique):
    """Replicates the model and averages gradients, overlapped with backward, once per accumulated step.

    Args:
        size: number of replicas; "auto" takes the ranks that no other technique claims.
        compression: what gradients are sent and summed as: "bf16" or "fp16" (half the bytes), or None for their dtype.
        bucket_mb: MiB of gradients in one message.

    Raises:
        ValueError: an unknown compression or a bucket size that is not positive.
    """

    size: Size = "auto"
    _: KW_ONLY
    compression: Compression | None = None
    bucket_mb: float = 25

    phase: ClassVar[Phase] = Phase.SHARD

    def __post_init__(self) -> None:
        one_of("DataParallel", "compression", self.compression, (None, "bf16", "fp16"))
        number = isinstance(self.bucket_mb, (int, float)) and not isinstance(self.bucket_mb, bool)
        if not number or not 0 < self.bucket_mb < math.inf:
            raise ValueError(f"DataParallel(bucket_mb={self.bucket_mb!r}): bucket_mb is a number greater than 0")

    @property
    def axes(self) -> Mapping[Axis, Size]:
        """See `Technique.axes`."""
        return {"dp_replicate": self.size}

    @property
    def traits(self) -> Traits:
        """See `Technique.traits`."""
        return Traits(averages_gradients=True)

    def divide(self, model: nn.Module, ground: PartitionContext, seen: None) -> Division:
        """Leaves the model as it is; the division's step averages all gradients."""
        return Averaged(model, ground.mesh, self)


@dataclass(eq=False)
class Averaged(Division):
    """A model that every replica holds whole."""

    mesh: ParallelMesh
    technique: DataParallel

    def step(self, step: Step) -> Step:
        """Adds the reduction of all gradients to the step."""
        asked, replicas = self.technique, Replicas(self.model, self.mesh)
        parameters = list(self.model.parameters())
        return average_gradients(step, parameters, self.mesh, asked.compression, asked.bucket_mb, replicas)
