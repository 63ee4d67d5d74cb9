"""What a rank has to do for one batch: the step on each microbatch, the weights of their losses, their gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_parallel.techniques.division import Division
from lightning_parallel.techniques.pipeline_parallel.gradients import Gradients
from lightning_parallel.techniques.pipeline_parallel.loss import Shares
from lightning_parallel.techniques.pipeline_parallel.probe import REMEDIES
from lightning_parallel.techniques.pipeline_parallel.stages import StageOutput
from lightning_parallel.techniques.step import BatchContext, StepFn
from lightning_parallel.techniques.tools.means import Means
from lightning_parallel.values import map_tensors, tensors_of

T = TypeVar("T")


class LossStage(NamedTuple):
    """What follows the blocks, for the whole batch; `join` makes one stage output of those of all microbatches."""

    batch: Any
    join: Callable[[Sequence[StageOutput]], StageOutput]


class BatchWork:
    """The work of one rank on one batch.

    Args:
        run: the user's step.
        microbatches: what it is run on.
        arguments: its further arguments.
        context: of the batch.
        divisions: encode what goes from stage to stage.
        loss_stage: computes the loss of all microbatches; None where each has its own.
        shares: the weights of microbatches' losses in that of the batch.
        gradients: per stage of this rank, those of the parameters it uses.
        training: whether gradients are computed.
    """

    def __init__(
        self,
        run: StepFn[Any],
        microbatches: Sequence[Any],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        context: BatchContext,
        divisions: Sequence[Division],
        loss_stage: LossStage | None,
        shares: Shares,
        gradients: dict[int, Gradients],
        training: bool,
    ) -> None:
        self.microbatches, self.loss_stage, self.shares, self.gradients = microbatches, loss_stage, shares, gradients
        self.training = training
        self._run, self._arguments, self.context, self._divisions = run, arguments, context, divisions
        self.outputs: dict[int, Any] = {}
        self._losses: dict[int, Tensor | None] = {}
        self._multiples: dict[int, list[Tensor]] = {}
        self._terms: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def step(self, microbatch: int | None) -> Callable[[], Any]:
        """Runs the user's step on a microbatch, or on the batch."""
        if microbatch is None:
            assert self.loss_stage is not None
            batch = map_tensors(Tensor.clone, self.loss_stage.batch)
        else:
            batch = self.microbatches[microbatch]
        rest, options = self._arguments
        return partial(_with_error_context, self._run, batch, *rest, **options)

    def shapes(self, microbatch: int) -> Hashable:
        """The shapes of a microbatch, by which what stages send of it is recognised."""
        return tuple((tensor.shape, tensor.dtype) for tensor in tensors_of(self.microbatches[microbatch]))

    def encode(self, value: Any) -> Any:
        """What a stage returned, as plain tensors and plain values."""
        for division in self._divisions:
            value = division.encode_activation(value)
        return value

    def decode(self, value: Any) -> Any:
        """The opposite of `encode`."""
        for division in self._divisions:
            value = division.decode_activation(value)
        return value

    def keep_output(self, microbatch: int, means: Means, output: Any) -> Tensor | None:
        """Keeps what the step returned for a microbatch, and the weight of its loss, which this returns."""
        loss, shares = loss_of(output), self.shares
        self.outputs[microbatch] = detached = map_tensors(Tensor.detach, output)
        self._losses[microbatch] = loss_of(detached)
        shares.add(microbatch, means, loss)
        learning = [tensor for tensor in tensors_of(output) if not tensor.dim() and tensor.requires_grad]
        parts = [(tensor, means.parts_of(tensor)) for tensor in learning]
        self._multiples[microbatch] = [tensor.detach() for tensor, found in parts if found]
        self._terms[microbatch] = [
            (mean.count, part) for tensor, found in parts if tensor is loss for mean, part in found.items()
        ]
        if shares.whole and self.training:
            self.context.records.scale_means(means)
        return loss

    def seed(self, microbatch: int) -> Tensor | None:
        """The gradient of the loss of a microbatch; None without a loss."""
        loss, share = self._losses[microbatch], self.shares.seed(microbatch)
        if loss is None:
            return None
        scaled = share * self.context.scale
        # A number is filled in on the device; made into a tensor of the host, it would be waited for.
        return scaled.to(loss).expand_as(loss) if isinstance(scaled, Tensor) else torch.full_like(loss, scaled)

    def require_alike_terms(self, shares: Sequence[float]) -> None:
        """Require the loss to be one over all microbatches, if each mean in it is taken over its own targets.

        A rest, which is no mean of torch's, counts by samples.

        Args:
            shares: of the microbatches, by the targets of all means together.

        Raises:
            ValueError: the loss adds up means over different things, so that it is another one.
        """
        losses = [loss for _, loss in sorted(self._losses.items()) if loss is not None]
        terms = [self._terms[number] for number in sorted(self._terms)]
        if self.shares.whole or len(losses) < len(shares) or len(set(map(len, terms))) != 1 or not terms[0]:
            return
        rests = list(map(float, losses))
        together = sum(map(operator.mul, shares, rests))
        expected = 0.0
        for same in zip(*terms, strict=True):
            counts, values = [float(count) for count, _ in same], [float(value) for _, value in same]
            expected += sum(map(operator.mul, counts, values)) / (sum(counts) or 1.0)
            rests = list(map(operator.sub, rests, values))
        expected += sum(map(operator.mul, self.shares.sizes, rests)) / sum(self.shares.sizes)
        if abs(expected - together) > 16 * torch.finfo(losses[0].dtype).eps * max(1e-3, abs(expected)):
            raise ValueError(
                f"In a pipeline, the loss of the batch is {expected:.10g}, but its microbatches together make "
                f"{together:.10g}: {REMEDIES[0]}"
            )

    def means_of(self, microbatch: int) -> list[Tensor]:
        """Values that count in the batch by the share of a microbatch: means over targets, and the loss of training."""
        loss = self._losses[microbatch] if self.training and not self.shares.whole else None
        return [*self.shares.means.get(microbatch, []), *([] if loss is None else [loss])]

    def multiples_of(self, microbatch: int) -> list[Tensor]:
        """Numbers in what the step returned that are means, or sums of multiples of them."""
        return [*self.means_of(microbatch), *self._multiples[microbatch]]


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a step returned; None without one."""
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None


def _with_error_context(run: StepFn[T], *args: Any, **kwargs: Any) -> T:
    """Runs the step; an evaluation was not observed before, and may take gradients that end at another stage."""
    try:
        return run(*args, **kwargs)
    except RuntimeError as error:
        if "appears to not have been used in the graph" not in str(error):
            raise
        raise RuntimeError(
            "the step takes gradients to a tensor that another stage of the pipeline computes with; take them to what "
            "the last block returned, or use ZeroStrategy, which divides any model"
        ) from error
