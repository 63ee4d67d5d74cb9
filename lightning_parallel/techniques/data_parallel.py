"""Data parallel: every rank holds the full model and reads different samples; gradients are averaged.

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


@dataclass(frozen=True)
class DataParallel(Technique):
    """Replicates the model and averages gradients, overlapped with backward, once per accumulated step.

    Args:
        size: number of replicas; "auto" takes the ranks that no other technique claims.
        compression: dtype in which gradients are all-reduced: "bf16", "fp16" (half the bytes), or None for their own.
        bucket_mb: size of a gradient bucket (one message), in MiB.

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

    def divide(self, model: nn.Module, context: PartitionContext, analysis: None) -> Division:
        """Leave the model as it is; the division's step averages all gradients."""
        return Averaged(model, context.mesh, self)


@dataclass(eq=False)
class Averaged(Division):
    """A model of which every rank holds a full replica."""

    mesh: ParallelMesh
    technique: DataParallel

    def step(self, step: Step) -> Step:
        """Wrap the step so that backward averages the gradients of all parameters."""
        options, named = self.technique, dict(self.model.named_parameters())
        return average_gradients(step, [*named.values()], self.mesh, options.compression, options.bucket_mb, named)
