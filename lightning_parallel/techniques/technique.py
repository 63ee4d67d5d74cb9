"""What a technique is: a configuration whose behaviour is up to three maps, identities unless it says otherwise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import nn

from lightning_parallel.mesh import Axis, Claim, ParallelMesh, Size
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.techniques.step import Step


class Phase(IntEnum):
    """When a technique acts on the model. The order in which a user lists techniques has no meaning."""

    SPLIT = 0
    PARTITION = 1
    CHECKPOINT = 2
    COMPILE = 3
    SHARD = 4


@dataclass(frozen=True)
class Sample:
    """One step of the user's on a batch like those to come, to be looked at before the model is divided.

    Attributes:
        run: runs the step on the batch, or on another one like it, without effect on logs and metrics.
        size: how many samples the batch has.
        batch: the batch.
        device: where the batch and the module are at that time.
    """

    run: Callable[..., Any]
    size: int
    batch: Any
    device: torch.device


class Technique(ABC):
    """One way to divide training: it claims axes of the mesh and maps model, batch and step."""

    phase: ClassVar[Phase]
    ends_last: ClassVar[bool] = False
    """Whether its step goes around those of all others, to finish what they leave."""

    @property
    @abstractmethod
    def axes(self) -> Mapping[Axis, Size]:
        """The axes that this technique owns, with their sizes."""

    @property
    def claim(self) -> Claim:
        """The axes under the name by which messages call this technique."""
        return Claim(repr(self), self.axes)

    def prepare(
        self, model: nn.Module, mesh: ParallelMesh, plan: ParallelPlan, sample: Callable[[], Sample]
    ) -> Technique:
        """Technique -> technique: the same after a look at the whole model and, where it must, at a step of it."""
        return self

    def parallelize(self, model: nn.Module, mesh: ParallelMesh, plan: ParallelPlan) -> nn.Module:
        """Model -> model: changes the network that the plan points to, keeping every parameter's name."""
        return model

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed one after the other, from one graph."""
        return False

    @property
    def keeps_backward_whole(self) -> str | None:
        """Why a backward pass of this technique cannot be split so, None if it can."""
        return None

    @property
    def keeps_shards_on_host(self) -> bool:
        """Whether the parameters that `parallelize` shards live in host memory."""
        return False

    def shard_batch(self, batch: Any, mesh: ParallelMesh, plan: ParallelPlan) -> Any:
        """Batch -> batch: this rank's part of a batch that several ranks read alike."""
        return batch

    def wrap_step(self, step: Step, model: nn.Module, mesh: ParallelMesh, plan: ParallelPlan) -> Step:
        """Step -> step: what this technique does during a step, when the parameters are real and in place.

        `model` is what this technique's `parallelize` returned.
        """
        return step
