"""`Division`, the result of applying one technique to a model, and the context that techniques get to do so."""

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
    """The user's step and its first batch, for techniques that analyze a step before the model is divided.

    Attributes:
        run: runs the step on `batch`, or on the batch that it is given, without effect on logs and metrics.
        batch: the first batch of rank 0 (of this rank, if that cannot be pickled).
        device: of the batch and of the module at that time.
        unchanged: returns a context manager that restores attributes and hooks of the module's submodules on exit.
    """

    run: Callable[..., Any]
    batch: Any
    device: torch.device
    unchanged: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class PartitionContext:
    """The mesh, the plan and the sample step with which techniques divide a model.

    Attributes:
        sample: returns the user's step with its first batch; only techniques that analyze a step call it.
        divisions: the divisions of all techniques, in order; complete when `Division.step` is called.
    """

    mesh: ParallelMesh
    plan: ParallelPlan
    sample: Callable[[], Sample]
    divisions: Sequence[Division] = ()


@dataclass(eq=False)
class Division:
    """The result of applying a technique to a model; methods return their argument unless the technique overrides them.

    Attributes:
        model: the model for the next technique; its parameters may still be on meta.
    """

    model: nn.Module

    @property
    def losses_over_batch(self) -> bool:
        """Whether the user's step computes its losses once, from all samples of this rank's batch."""
        return True

    def batch(self, batch: Any) -> Any:
        """Return this rank's part of a batch that several ranks read. Opposite of `outputs`."""
        return batch

    def outputs(self, outputs: Any) -> Any:
        """Return the outputs for the full batch, given those of the user's step on this rank's part."""
        return outputs

    def run(self, run: StepFn[T]) -> StepFn[T]:
        """Wrap the user's step. In a pipeline the result is called for every microbatch on every stage."""
        return run

    def expose_gathered(self) -> None:
        """Make parameters that were gathered after the user's step began compute as full ones. Called in the step."""

    def encode_activation(self, value: Any) -> Any:
        """Convert what a pipeline stage sends to the next stage to plain tensors and values."""
        return value

    def decode_activation(self, value: Any) -> Any:
        """Restore what the previous pipeline stage sent. Opposite of `encode_activation`."""
        return value

    def step(self, step: Step) -> Step:
        """Wrap the `Step` of the techniques before. Called when parameters have their values and their device."""
        return step

    def outermost_step(self, step: Step) -> Step:
        """Wrap the `Step` that all techniques' `step` have built, to do something after each of them."""
        return step
