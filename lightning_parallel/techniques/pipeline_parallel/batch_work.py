"""What a rank has to do for one batch: the step on each microbatch, the weights of their losses, their gradients."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.techniques.division import Division
from lightning_parallel.techniques.pipeline_parallel.gradients import Gradients
from lightning_parallel.techniques.pipeline_parallel.probe import REMEDIES
from lightning_parallel.techniques.step import BatchContext
from lightning_parallel.techniques.tools.means import Means
from lightning_parallel.values import TensorSpec, children_of, map_tensors, rebuilt, tensors_of


@dataclass(eq=False)
class BatchWork:
    """The work of one rank on one batch, and the shares that its microbatches' losses have in the batch's.

    Shares are by targets where the losses are means over targets, else by samples. How many targets there are in all is
    known only after the last microbatch, and on all ranks. So backwards sum over targets, and the sum becomes a mean in
    the end: ranks may have given gradients to each other by then, as experts do, so what differs between ranks is in
    each backward, and what is left to multiply by is the same on all.
    """

    run: Callable[[Any], Any]  # runs the user's step on a microbatch, or on the batch
    batch: Any  # all samples
    microbatches: Sequence[Any]  # the parts of it
    part_sizes: Sequence[int]  # how many samples these have
    context: BatchContext
    over_batch: bool  # whether what follows the blocks runs once for the batch, see `Schedule.with_loss_stage`
    whole: bool  # whether there is one loss, each of whose means counts by its targets where it is computed
    unit: float  # so many targets count as one in backwards, to keep gradients of a usual size; the same on all ranks
    divisions: Sequence[Division]  # encode what goes from stage to stage
    gradients: dict[int, Gradients]  # per stage of this rank, those of the parameters it uses
    training: bool  # whether gradients are computed; the same on all ranks, for it decides how they send
    # by microbatch: what the step returned, numbers in it that are sums of multiples of means, its loss, its means, its
    # targets, and of each mean in the loss (count, part of the loss)
    outputs: dict[int, Any] = field(default_factory=dict)
    multiples: dict[int, list[Tensor]] = field(default_factory=dict)
    _losses: dict[int, Tensor | None] = field(default_factory=dict)
    _means: dict[int, list[Tensor]] = field(default_factory=dict)
    _counts: dict[int, Tensor] = field(default_factory=dict)
    _terms: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = [sum(self.part_sizes)] if self.over_batch else self.part_sizes  # of what has a loss of its own

    def shapes(self, microbatch: int) -> Hashable:
        """The shapes of a microbatch, by which what stages send of it is recognised."""
        return tuple((tensor.shape, tensor.dtype) for tensor in tensors_of(self.microbatches[microbatch]))

    def decode(self, value: Any) -> Any:
        """What a stage returned, from plain tensors and plain values; the opposite of `Division.encode_activation`."""
        for division in self.divisions:
            value = division.decode_activation(value)
        return value

    def keep_output(self, microbatch: int, means: Means, output: Any) -> Tensor | None:
        """Keeps what the step returned for a microbatch, and the weight of its loss, which this returns."""
        loss = loss_of(output)
        self.outputs[microbatch] = detached = map_tensors(Tensor.detach, output)
        self._losses[microbatch] = loss_of(detached)
        means.returned(loss)
        self._means[microbatch] = [mean.given for mean in means.all]
        if not self.whole and means.count is not None:
            self._counts[microbatch] = means.count
        learning = [tensor for tensor in tensors_of(output) if not tensor.dim() and tensor.requires_grad]
        parts = [(tensor, means.parts_of(tensor)) for tensor in learning]
        self.multiples[microbatch] = [tensor.detach() for tensor, found in parts if found]
        self._terms[microbatch] = [
            (mean.count, part) for tensor, found in parts if tensor is loss for mean, part in found.items()
        ]
        if self.whole and self.training:
            self.context.records.scale_means(means)
        return loss

    # ---------------------------------------------------------------- shares

    def seed(self, microbatch: int) -> Tensor | None:
        """The gradient of the loss of a microbatch; None without a loss."""
        loss, weight = self._losses[microbatch], self.context.weight
        if loss is None:
            return None
        if microbatch in self._counts and weight:
            # Filled in on the device; made into a tensor of the host, a number would be waited for.
            return (self._counts[microbatch] / self.unit * self.context.scale).to(loss).expand_as(loss)
        return torch.full_like(loss, self.sizes[microbatch] / sum(self.sizes) * weight * self.context.scale)

    def shares(self) -> tuple[list[float], float | None, float | None]:
        """The share of each microbatch, how many targets count as one in gradients, and how many the batch has.

        The latter two are None where losses count by samples: their gradients are means.

        Raises:
            ValueError: some microbatches averaged over targets, and others did not.
        """
        by_samples = [size / sum(self.sizes) for size in self.sizes]
        if not self._counts:
            return by_samples, None, None
        if len(self._counts) < len(self.sizes):
            raise ValueError(
                f"training_step computed a mean over targets for microbatches {sorted(self._counts)} of "
                f"{len(self.sizes)} only; in a pipeline all of them count in one way: decide it by batch_idx, or "
                "use microbatches=1"
            )
        counts = [float(count) for _, count in sorted(self._counts.items())]
        total = sum(counts)
        if not total and not self.context.alone:  # the losses are 0, and other ranks may have targets
            return by_samples, self.unit, total
        # a batch without targets has no gradient, as on one device
        return [count / total if total else math.nan for count in counts], self.unit, total

    def require_alike_terms(self, shares: Sequence[float]) -> None:
        """Require the loss to be one over all microbatches, if each mean in it is taken over its own targets.

        A rest, which is no mean of torch's, counts by samples; `shares` are by the targets of all means together.

        Raises:
            ValueError: the loss adds up means over different things, so that it is another one.
        """
        losses = [loss for _, loss in sorted(self._losses.items()) if loss is not None]
        terms = [self._terms[number] for number in sorted(self._terms)]
        if self.whole or len(losses) < len(shares) or len(set(map(len, terms))) != 1 or not terms[0]:
            return
        rests = list(map(float, losses))
        together = sum(map(operator.mul, shares, rests))
        expected = 0.0
        for same in zip(*terms, strict=True):
            counts, values = [float(count) for count, _ in same], [float(value) for _, value in same]
            expected += sum(map(operator.mul, counts, values)) / (sum(counts) or 1.0)
            rests = list(map(operator.sub, rests, values))
        expected += sum(map(operator.mul, self.sizes, rests)) / sum(self.sizes)
        if abs(expected - together) > 16 * torch.finfo(losses[0].dtype).eps * max(1e-3, abs(expected)):
            raise ValueError(
                f"In a pipeline, the loss of the batch is {expected:.10g}, but its microbatches together make "
                f"{together:.10g}: {REMEDIES[0]}"
            )

    def means_of(self, microbatch: int) -> list[Tensor]:
        """Values that count in the batch by the share of a microbatch: means over targets, and the loss of training."""
        loss = self._losses[microbatch] if self.training and not self.whole else None
        return [*self._means[microbatch], *([] if loss is None else [loss])]


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a step returned; None without one."""
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None


def joined(parts: Sequence[Any], sizes: Sequence[int], name: str) -> Any:
    """What a stage would hand on that had the whole batch; gradients go back to what is given.

    `parts` are what the stage of the last block, of this name, handed on for microbatches of so many samples.

    Raises:
        ValueError: a tensor has no rows of samples, and differs between microbatches.
    """
    first = parts[0]
    if not isinstance(first, (Tensor, TensorSpec)):
        children = [children_of(part) for part in parts]
        if not children[0]:
            return first
        return rebuilt(first, [joined(same, sizes, name) for same in zip(*children, strict=True)])
    lengths = [tensor.shape[0] if tensor.shape else 0 for tensor in parts]
    has_rows = lengths == list(sizes)
    if isinstance(first, TensorSpec):
        unequal = any(other != first for other in parts)
        return type(first)((sum(lengths), *first.shape[1:]), first.dtype) if has_rows or unequal else first
    if has_rows:
        return torch.cat(list(parts))
    if all(first.shape == other.shape and torch.equal(first, other) for other in parts):
        return first.clone()
    # tokens or views of each sample follow each other: [4 samples x 5, 8] and [3 samples x 5, 8]
    several, rest = divmod(lengths[0], sizes[0])
    if several and not rest and lengths == [several * size for size in sizes]:
        return torch.cat(list(parts))
    raise ValueError(
        f"PipelineParallel(loss_over='batch'): {name}, or what goes past it, returns a tensor of shape "
        f"{tuple(first.shape)} for {sizes[0]} samples that differs between microbatches, and its first dimension has "
        "no row for each sample: return samples on the first dimension, or use microbatches=1"
    )
