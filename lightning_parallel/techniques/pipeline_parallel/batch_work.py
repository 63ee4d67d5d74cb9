"""Work of a rank on one batch: the microbatches, the step to run on them, and the weights of their losses."""

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
    """The work of one rank on one batch, and the shares (weights) of the microbatches' losses in the batch's loss.

    Shares are by targets if the loss averages over targets (0.75 and 0.25 of 30 and 10 targets), else by samples. The
    number of targets on all ranks is known only after the last microbatch. So backwards start from `count / unit`, sum
    gradients over targets, and the sums are divided in the end. Factors that differ between ranks are in each backward,
    because ranks may exchange gradients before the end, as in expert parallel; the divisor is the same on all ranks.
    """

    run: Callable[[Any], Any]  # runs the user's step on a microbatch, or on the batch
    batch: Any  # all samples
    microbatches: Sequence[Any]  # parts of the batch
    part_sizes: Sequence[int]  # number of samples of each microbatch
    context: BatchContext
    over_batch: bool  # whether code after the blocks runs once for the full batch, see `Schedule.with_loss_stage`
    whole: bool  # whether there is a single loss; the gradient of each mean in it is then scaled by its own targets
    unit: float  # number by which target counts are divided, to keep gradients in a usual range; the same on all ranks
    divisions: Sequence[Division]  # encode and decode the values that stages send each other
    gradients: dict[int, Gradients]  # stage of this rank -> gradients of the parameters that it uses
    training: bool  # whether gradients are computed; the same on all ranks, because the message format depends on it
    # Results by microbatch; if `over_batch`, microbatch 0 stands for the full batch.
    outputs: dict[int, Any] = field(default_factory=dict)  # return values of the step
    multiples: dict[int, list[Tensor]] = field(default_factory=dict)  # scalars in outputs, linear in recorded means
    _means: dict[int, list[Tensor]] = field(default_factory=dict)  # values of the recorded means
    _counts: dict[int, Tensor] = field(default_factory=dict)  # numbers of targets
    _terms: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)  # (count, summand) of means in losses

    def __post_init__(self) -> None:
        self.sizes = [sum(self.part_sizes)] if self.over_batch else self.part_sizes  # number of samples of each loss

    def shapes(self, microbatch: int) -> Hashable:
        """Return shapes and dtypes of a microbatch: the key under which `P2P` knows the structure of its messages."""
        return tuple((tensor.shape, tensor.dtype) for tensor in tensors_of(self.microbatches[microbatch]))

    def decode(self, value: Any) -> Any:
        """Undo `Division.encode_activation` of all techniques on the output of a stage."""
        for division in self.divisions:
            value = division.decode_activation(value)
        return value

    def keep_output(self, microbatch: int, means: Means, output: Any) -> Tensor | None:
        """Store the step's output for a microbatch and the target count of its loss; return the loss with its graph.

        If `whole`, in training: collective over the ranks that read different samples, see `BatchRecords.scale_means`.
        """
        loss = loss_of(output)
        self.outputs[microbatch] = map_tensors(Tensor.detach, output)
        means.returned(loss)
        self._means[microbatch] = [mean.given for mean in means.all]
        if not self.whole and means.count is not None:
            self._counts[microbatch] = means.count
        scalars = [tensor for tensor in tensors_of(output) if not tensor.dim() and tensor.requires_grad]
        pairs = [(tensor, means.parts_of(tensor)) for tensor in scalars]
        self.multiples[microbatch] = [tensor.detach() for tensor, terms in pairs if terms]
        self._terms[microbatch] = [
            (mean.count, term) for tensor, terms in pairs if tensor is loss for mean, term in terms.items()
        ]
        if self.whole and self.training:
            self.context.records.scale_means(means)
        return loss

    # ---------------------------------------------------------------- shares

    def seed(self, microbatch: int) -> Tensor | None:
        """Return the gradient with which the backward of a microbatch's loss starts; None without a loss."""
        loss, weight = loss_of(self.outputs[microbatch]), self.context.weight
        if loss is None:
            return None
        if microbatch in self._counts and weight:
            # Computed on the device: converting the count to a Python number would wait for the device.
            return (self._counts[microbatch] / self.unit * self.context.scale).to(loss).expand_as(loss)
        return torch.full_like(loss, self.sizes[microbatch] / sum(self.sizes) * weight * self.context.scale)

    def shares(self) -> tuple[list[float], float | None, float | None]:
        """Return the share of each microbatch's loss, `unit`, and the number of targets in this rank's batch.

        The last two are None if losses are weighted by samples: gradients are means already.

        Raises:
            ValueError: some microbatches averaged over targets, and others did not.
        """
        by_samples = [size / sum(self.sizes) for size in self.sizes]
        if not self._counts:
            return by_samples, None, None
        if len(self._counts) < len(self.sizes):
            raise ValueError(
                f"training_step computed a mean over targets for microbatches {sorted(self._counts)} of "
                f"{len(self.sizes)} only; in a pipeline, all of them must, or none: decide it by batch_idx, or use "
                "microbatches=1"
            )
        counts = [float(count) for _, count in sorted(self._counts.items())]
        total = sum(counts)
        if not total and not self.context.alone:  # losses are 0 on this rank, but other ranks may have targets
            return by_samples, self.unit, total
        # without any target the loss is NaN, as on one device
        return [count / total if total else math.nan for count in counts], self.unit, total

    def require_same_weighting(self, shares: Sequence[float]) -> None:
        """Require that weighting losses by `shares` gives the same loss as weighting each mean by its own targets.

        `shares` are proportional to the targets of all means together. The remainder of a loss, which is no recorded
        mean, is weighted by samples.

        Raises:
            ValueError: the two losses differ, because the loss adds up means over different targets.
        """
        losses = [loss for _, output in sorted(self.outputs.items()) if (loss := loss_of(output)) is not None]
        terms = [self._terms[number] for number in sorted(self._terms)]
        if self.whole or len(losses) < len(shares) or len(set(map(len, terms))) != 1 or not terms[0]:
            return
        remainders = list(map(float, losses))
        combined = sum(map(operator.mul, shares, remainders))
        expected = 0.0
        for term in zip(*terms, strict=True):
            counts, values = [float(count) for count, _ in term], [float(value) for _, value in term]
            expected += sum(map(operator.mul, counts, values)) / (sum(counts) or 1.0)
            remainders = list(map(operator.sub, remainders, values))
        expected += sum(map(operator.mul, self.sizes, remainders)) / sum(self.sizes)
        if abs(expected - combined) > 16 * torch.finfo(losses[0].dtype).eps * max(1e-3, abs(expected)):
            raise ValueError(
                f"In a pipeline, the loss of the batch is {expected:.10g}, but its microbatches together make "
                f"{combined:.10g}: {REMEDIES[0]}"
            )

    def means_of(self, microbatch: int) -> list[Tensor]:
        """Return the values of a microbatch to be averaged by `shares`: recorded means, and the loss in training."""
        loss = loss_of(self.outputs[microbatch]) if self.training and not self.whole else None
        return [*self._means[microbatch], *([] if loss is None else [loss])]


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in the output of a step; None without one."""
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None


def concatenated(parts: Sequence[Any], sizes: Sequence[int], name: str) -> Any:
    """Concatenate outputs for microbatches to the output for the full batch; gradients flow back to `parts`.

    `parts` are what the stage of the last block, called `name`, returned for microbatches of `sizes` samples.

    Raises:
        ValueError: a tensor differs between microbatches, but its first dimension is not proportional to the samples.
    """
    first = parts[0]
    if not isinstance(first, (Tensor, TensorSpec)):
        children = [children_of(part) for part in parts]
        if not children[0]:
            return first
        return rebuilt(first, [concatenated(values, sizes, name) for values in zip(*children, strict=True)])
    lengths = [tensor.shape[0] if tensor.shape else 0 for tensor in parts]
    has_rows = lengths == list(sizes)
    if isinstance(first, TensorSpec):
        unequal = any(other != first for other in parts)
        return type(first)((sum(lengths), *first.shape[1:]), first.dtype) if has_rows or unequal else first
    if has_rows:
        return torch.cat(list(parts))
    if all(first.shape == other.shape and torch.equal(first, other) for other in parts):
        return first.clone()
    # Each sample has several consecutive rows, such as tokens or views: [4 samples x 5, 8] and [3 samples x 5, 8].
    rows_per_sample, remainder = divmod(lengths[0], sizes[0])
    if rows_per_sample and not remainder and lengths == [rows_per_sample * size for size in sizes]:
        return torch.cat(list(parts))
    raise ValueError(
        f"PipelineParallel(loss_over='batch'): the output of {name}, or a tensor that bypasses it, has shape "
        f"{tuple(first.shape)} for {sizes[0]} samples and differs between microbatches, but has no row for each "
        "sample; return samples in the first dimension, or use microbatches=1"
    )
