"""Techniques: frozen configurations of what the user asked for, never replaced and never written to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

from torch import nn

from lightning_parallel.mesh import AXES, Axis, Claim, Size
from lightning_parallel.techniques.division import Division, PartitionContext


class Phase(IntEnum):
    """The moments at which techniques act on the model, in their order."""

    SPLIT = 0
    PARTITION = 1
    CHECKPOINT = 2
    COMPILE = 3
    SHARD = 4


@dataclass(frozen=True)
class Traits:
    """Facts that others must know of a technique before it acts."""

    splits_backward: bool = False  # gradients of inputs and of weights are computed one after the other, from one graph
    keeps_backward_whole: str | None = None  # why a backward pass cannot be split so; None if it can
    shards_on_host: bool = False  # parameters that it shards live in host memory
    # gradients are averaged over `mesh.loss`; where no technique does, the lifecycle sees to it
    averages_gradients: bool = False
    steps_see_wholes: bool = False  # though its ranks average gradients, their steps see, log and return the same
    # ranks that read different samples wait for each other within a forward, so all of them must divide their batches
    # into as many microbatches
    meets_in_forward: bool = False
    # modules get other tensors in the place of theirs: shards, or what looks whole, or nothing
    replaces_tensors: bool = False
    replaces_parameters: bool = False  # so they do in the place of parameters that ranks hold
    acts_alone: bool = False  # it does what it does in a group of one rank, too


class Technique(ABC):
    """One way to divide training: it claims axes of the mesh, looks at a model, and divides it."""

    phase: ClassVar[Phase]

    @property
    @abstractmethod
    def axes(self) -> Mapping[Axis, Size]:
        """The axes that this technique owns, with their sizes."""

    @property
    def claim(self) -> Claim:
        """The axes under the name by which messages call this technique."""
        return Claim(repr(self), self.axes)

    @property
    def traits(self) -> Traits:
        """The facts that others must know of this technique before it acts."""
        return Traits()

    @property
    def order(self) -> tuple[int, int, str]:
        """Its place among others: by phase, then from the innermost axis of the mesh outwards, then by its text."""
        innermost = max((AXES.index(axis) for axis in self.axes), default=-1)
        return self.phase, -innermost, repr(self)

    def check(self, sizes: Mapping[Axis, int]) -> None:  # noqa: B027
        """Raises ValueError where this technique does not fit a mesh of these sizes, before any process is started."""

    def analyze(self, model: nn.Module, ground: PartitionContext) -> Any:
        """Analyze the unpartitioned model. Returns plain data; ranks compare it and raise if it differs."""
        return None

    def divide(self, model: nn.Module, ground: PartitionContext, seen: Any) -> Division:
        """Divides the model that earlier techniques left, keeping every parameter's name; `analyze` returned `seen`."""
        return Division(model)
