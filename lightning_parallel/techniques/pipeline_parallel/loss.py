"""Losses of microbatches: the share of each in the loss of the batch, or what they return joined for one loss.

With `loss_over="batch"`, what follows the blocks runs once, as a stage of its own: see `Schedule.with_loss_stage`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.techniques.pipeline_parallel.stages import StageOutput
from lightning_parallel.techniques.tools.means import Means
from lightning_parallel.values import TensorSpec, children_of, rebuilt


class Shares:
    """Shares that microbatches' losses have in the batch's.

    By targets where the losses are means over targets, else by samples. How many targets there are in all is known only
    after the last microbatch, and on all ranks. So backwards sum over targets, and the sum becomes a mean in the end:
    ranks may have given gradients to each other by then, as experts do, so what differs between ranks is in each
    backward, and what is left to multiply by is the same on all.

    Args:
        sizes: the samples of each microbatch.
        weight: how much this rank's samples count against those of others.
        unit: so many targets count as one in backwards, to keep gradients of a usual size; the same on all ranks.
        whole: whether there is one loss, each of whose means counts by its targets where it is computed.
        alone: whether no other rank has samples of this batch.
    """

    def __init__(self, sizes: Sequence[int], weight: float, unit: float, whole: bool, alone: bool) -> None:
        self.sizes = sizes
        self._of_samples = [size / sum(sizes) for size in sizes]
        self._weight, self._unit, self.whole, self._alone = weight, unit, whole, alone
        self._counts: dict[int, Tensor] = {}
        self.means: dict[int, list[Tensor]] = {}

    def add(self, microbatch: int, means: Means, loss: Tensor | None) -> None:
        """Takes the means that the step of a microbatch computed, and its loss."""
        means.returned(loss)
        self.means[microbatch] = [mean.given for mean in means.all]
        count = None if self.whole else means.count
        if count is not None:
            self._counts[microbatch] = count

    def seed(self, microbatch: int) -> Tensor | float:
        """The factor by which the backward of a microbatch multiplies its loss."""
        if microbatch not in self._counts or not self._weight:
            return self._of_samples[microbatch] * self._weight
        return self._counts[microbatch] / self._unit

    def final(self) -> tuple[list[float], float | None]:
        """The share of each microbatch, and how many targets count as one in gradients; None if these are means.

        Raises:
            ValueError: some microbatches averaged over targets, and others did not.
        """
        if not self._counts:
            return self._of_samples, None
        if len(self._counts) < len(self._of_samples):
            raise ValueError(
                f"training_step computed a mean over targets for microbatches {sorted(self._counts)} of "
                f"{len(self._of_samples)} only; in a pipeline all of them count in one way: decide it by batch_idx, or "
                "use microbatches=1"
            )
        counts = [float(count) for _, count in sorted(self._counts.items())]
        total = sum(counts)
        if not total and not self._alone:  # the losses are 0, and other ranks may have targets
            return self._of_samples, self._unit
        # a batch without targets has no gradient, as on one device
        return [count / total if total else math.nan for count in counts], self._unit

    @property
    def targets(self) -> float | None:
        """How many targets the whole batch has; None where losses count by samples."""
        return sum(map(float, self._counts.values())) if self._counts else None


def joined(parts: Sequence[StageOutput], sizes: Sequence[int], blocks: Sequence[str]) -> StageOutput:
    """What a stage would hand on that had the whole batch; gradients go back to what is given.

    Args:
        parts: what the stage of the last block handed on, for each microbatch.
        sizes: how many samples these have.
        blocks: the FQN of the blocks.

    Raises:
        ValueError: a tensor has no rows of samples, and differs between microbatches.
    """
    given = {field.name: [getattr(part, field.name) for part in parts] for field in fields(StageOutput)}
    return StageOutput(**{name: _joined(values, sizes, blocks[-1]) for name, values in given.items()})


def _joined(values: Sequence[Any], sizes: Sequence[int], name: str) -> Any:
    if isinstance(values[0], (Tensor, TensorSpec)):
        return _one(values, sizes, name)
    children = [children_of(value) for value in values]
    if not children[0]:
        return values[0]
    return rebuilt(values[0], [_joined(same, sizes, name) for same in zip(*children, strict=True)])


def _one(same: Sequence[Any], sizes: Sequence[int], name: str) -> Any:
    """One tensor, or its shape, of those of the microbatches: rows of samples, or else the same for all."""
    first, lengths = same[0], [tensor.shape[0] if tensor.shape else 0 for tensor in same]
    has_rows = lengths == list(sizes)
    # Tokens or views of each sample follow each other: [4 samples x 5, 8] and [3 samples x 5, 8].
    several = lengths[0] % sizes[0] == 0 and all(
        n * sizes[0] == lengths[0] * size for n, size in zip(lengths, sizes, strict=True)
    )
    if isinstance(first, TensorSpec):
        unequal = any(other != first for other in same)
        return type(first)((sum(lengths), *first.shape[1:]), first.dtype) if has_rows or unequal else first
    if has_rows:
        return torch.cat(list(same))
    if all(first.shape == other.shape and torch.equal(first, other) for other in same):
        return first.clone()
    if several and lengths[0]:
        return torch.cat(list(same))
    raise ValueError(
        f"PipelineParallel(loss_over='batch'): {name}, or what goes past it, returns a tensor of shape "
        f"{tuple(first.shape)} for {sizes[0]} samples that differs between microbatches, and its first dimension has "
        "no row for each sample: return samples on the first dimension, or use microbatches=1"
    )
