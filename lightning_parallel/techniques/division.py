"""Divisions: what one technique did to one model in one run; and the ground on which techniques divide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.techniques.step import Step, StepFn

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """One step of the user's on a batch like those to come, to be looked at before the model is divided.

    Attributes:
        run: runs the step on the batch, or on another one like it, without effect on logs and metrics.
        device: where the batch and the module are at that time.
        unchanged: makes a context; after it the module's parts keep in their attributes what they kept before.
    """

    run: Callable[..., Any]
    batch: Any
    device: torch.device
    unchanged: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class PartitionContext:
    """The mesh, the plan and the sample step with which a model is divided.

    Attributes:
        sample: takes a sample step; only techniques that must see one call it.
        divisions: those of all techniques, in their order; complete when `Division.step` is called.
    """

    mesh: ParallelMesh
    plan: ParallelPlan
    sample: Callable[[], Sample]
    divisions: Sequence[Division] = ()


@dataclass(eq=False)
class Division:
    """What a technique did to a model: the identity of all maps, of which techniques override some.

    Attributes:
        model: what the next technique gets; its parameters may still be on meta.
    """

    model: nn.Module

    @property
    def losses_over_batch(self) -> bool:
        """Whether the user's step computes its losses once, from all samples of this rank's batch."""
        return True

    def batch(self, batch: Any) -> Any:
        """Batch -> batch: this rank's part of a batch that several ranks read alike. Opposite of `outputs`."""
        return batch

    def outputs(self, outputs: Any) -> Any:
        """Outputs -> outputs: what the user's step returned on this rank's part, as it would be for the batch."""
        return outputs

    def run(self, run: StepFn[T]) -> StepFn[T]:
        """Run -> run: around every call of the user's step, be it for a microbatch and one stage of it."""
        return run

    def show(self) -> None:
        """Within a call of the user's step: shows as full also parameters that were gathered since it began."""

    def encode_activation(self, value: Any) -> Any:
        """What a stage of a pipeline sends to the next one, as plain tensors and plain values."""
        return value

    def decode_activation(self, value: Any) -> Any:
        """What was received from the stage before, as it was there. Opposite of `encode_activation`."""
        return value

    def step(self, step: Step) -> Step:
        """Step -> step: around a batch. Called when parameters are real and in place."""
        return step

    def settle(self, step: Step) -> Step:
        """Step -> step: around the steps of all techniques, to finish what they leave."""
        return step
