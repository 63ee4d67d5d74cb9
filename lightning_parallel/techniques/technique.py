"""Base class of the techniques: frozen dataclasses with the user's options, never replaced and never written to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

from torch import nn

from lightning_parallel.mesh import AXES, Axis, Claim, Size
from lightning_parallel.techniques.division import Division, PartitionContext


class Phase(IntEnum):
    """The phases in which techniques divide the model, in this order."""

    SPLIT = 0  # into pipeline stages
    PARTITION = 1  # tensor, context and expert parallel
    CHECKPOINT = 2
    COMPILE = 3
    SHARD = 4  # ZeRO and data parallel


@dataclass(frozen=True)
class Traits:
    """Properties of a technique that the strategy and other techniques must know before the model is divided."""

    splits_backward: bool = False  # computes input gradients and weight gradients in two passes over one graph
    why_backward_is_joint: str | None = None  # why backward cannot be split so, as a verb phrase; None if it can
    shards_on_host: bool = False  # keeps the parameter shards in host memory
    # averages gradients over `mesh.loss`; if no technique does, `DataParallel(1)` is added
    averages_gradients: bool = False
    replicates_steps: bool = False  # its ranks average gradients, but their steps see, log and return the same values
    # ranks that read different samples communicate within the forward, so all of them must split their batches into
    # the same number of microbatches
    communicates_in_forward: bool = False
    # replaces tensors of modules by shards, by tensors with the full shape, or by nothing: TorchScript is refused
    replaces_tensors: bool = False
    replaces_parameters: bool = False  # replaces parameters that a rank holds by shards: subclasses are refused
    acts_on_one_rank: bool = False  # also acts in a group of one rank


class Technique:
    """One way to divide training: claims axes of the mesh, then on every rank analyzes and divides the model."""

    phase: ClassVar[Phase]

    @property
    def axes(self) -> Mapping[Axis, Size]:
        """The axes of the mesh that this technique owns, with their sizes, e.g. {"tp": 2}; it may own none."""
        return {}

    @property
    def claim(self) -> Claim:
        """The axes with the name of this technique in error messages."""
        return Claim(repr(self), self.axes)

    @property
    def traits(self) -> Traits:
        """The properties that must be known before this technique divides the model."""
        return Traits()

    @property
    def order(self) -> tuple[int, int, str]:
        """Key by which techniques are sorted: phase, then from the innermost mesh axis outwards, then `repr`."""
        innermost = max((AXES.index(axis) for axis in self.axes), default=-1)
        return self.phase, -innermost, repr(self)

    def check(self, sizes: Mapping[Axis, int]) -> None:
        """Raise ValueError if this technique does not fit a mesh of these sizes. Called before any process starts."""

    def analyze(self, model: nn.Module, context: PartitionContext) -> Any:
        """Analyze the unpartitioned model. Returns plain data; ranks compare it and raise if it differs."""
        return None

    def divide(self, model: nn.Module, context: PartitionContext, analysis: Any) -> Division:
        """Divide the model of the previous technique; parameters keep their names. `analyze` returned `analysis`."""
        return Division(model)
