"""`Step`: how one batch is computed, and how techniques wrap the user's `training_step` and its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_parallel.techniques.tools.means import Means
    from lightning_parallel.techniques.tools.undone_writes import UndoneWrites

T = TypeVar("T")
StepFn = Callable[..., T]
"""The user's `training_step`, `validation_step`, ...; it may be called several times for one batch."""

Silent = Callable[[], AbstractContextManager["UndoneWrites | None"]]


class BatchRecords:
    """Records what the user's step logs and changes in each microbatch of a batch. This base class records nothing."""

    def track_buffers(self, buffers: Sequence[str]) -> None:
        """Track these replicated buffers, so that all microbatches of a batch update them once."""

    def collect(self, means: Sequence[Sequence[Tensor]] = (), targets: float | None = None) -> Any:
        """Return the records of all calls, for the ranks that do not run the end of the step.

        Args:
            means: for each call, its losses and the other values that are averaged in the same way.
            targets: number of targets that losses are averaged over; None if they are averaged over samples.
        """

    def replay(self, records: Any) -> None:
        """Log and set on this rank what `collect` returned, on this rank or another one."""

    def scale_means(self, means: Means) -> None:
        """Set the gradient scale of each recorded mean. Collective over the ranks that read different samples.

        Called if the backward pass runs before `Step.backward`, as in a pipeline.
        """

    def normalize_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of the batch, scaled so that its gradient is a mean over the targets of all ranks."""
        return loss


@dataclass(frozen=True)
class BatchContext:
    """Facts about a batch, known when it begins."""

    index: int = 0  # number of training batches before this one
    # weight of this rank's loss in the mean over ranks: 3 * 2 / 5 with 3 of 5 samples on 2 ranks; 0.0 without samples
    weight: float = 1.0
    samples: int | None = None  # smallest number of samples on any rank; None unless ranks communicate in the forward
    scale: float = 1.0  # loss scale of mixed precision, for steps that compute gradients before `Step.backward`
    # whether no other rank has samples of this batch, so that a batch without targets on this rank has none at all
    alone: bool = True
    # receives what the step logs if it runs on microbatches
    records: BatchRecords = field(default_factory=BatchRecords)
    # returns a context manager in which the step leaves no trace in logs, metrics, tensors and random states
    silent: Silent = nullcontext


class Step:
    """How one batch is computed: forward, backward, and the tensors that the optimizer steps.

    Without an `inner` step this class is the single-device step. A technique that acts during the step subclasses
    `WrappedStep`; methods that the subclass does not override call the inner step.
    """

    inner: Step | None = None

    @property
    def applies_sample_weight(self) -> bool:
        """Whether gradients already include `BatchContext.weight`, so that the loss must not be multiplied by it."""
        return self.inner is not None and self.inner.applies_sample_weight

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """Run the user's `training_step` (or validation, test, predict) with its arguments."""
        return self.inner.forward(run, *args, **kwargs) if self.inner else run(*args, **kwargs)

    def begin_batch(self, batch: BatchContext) -> None:
        """Set the context of the next batch. Called before `forward`."""
        if self.inner:
            self.inner.begin_batch(batch)

    def backward(self, run: Callable[[], None]) -> None:
        """Run the backward pass; then gradients are those of the global batch, unless it ran inside `unsynced`."""
        return self.inner.backward(run) if self.inner else run()

    def unsynced(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes accumulate locally; a later pass communicates for all of them."""
        return nullcontext()

    def stored(self, parameter: nn.Parameter) -> Tensor:
        """Return the tensor that the optimizer steps for `parameter`: itself, or this rank's shard."""
        return self.inner.stored(parameter) if self.inner else parameter

    def accumulated(self, parameter: nn.Parameter) -> Tensor:
        """Return the tensor that has the shape of the accumulated gradient: `parameter`, or this rank's shard."""
        return self.inner.accumulated(parameter) if self.inner else parameter

    def average_user_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average gradients that the step set itself, such as results of `torch.autograd.grad`.

        Called in manual optimization before an optimizer clips or steps. Collective over all ranks.
        """
        if self.inner:
            self.inner.average_user_gradients(parameters)

    def gathered(self) -> list[Tensor]:
        """Return the gathered parameters: full tensors whose memory is allocated and filled during the step."""
        return self.inner.gathered() if self.inner else []

    def regather_parameters(self) -> None:
        """Gather parameters again, to undo writes of the user's step. Collective over the ranks that shard them."""
        if self.inner:
            self.inner.regather_parameters()

    def shard_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace full gradients, which hooks set in place of sharded ones, by this rank's shard. No communication."""
        if self.inner:
            self.inner.shard_gradients(parameters)

    def before_backward(self) -> None:
        """Take over what the step wrote to gradients. Called in manual optimization before each `backward`."""
        if self.inner:
            self.inner.before_backward()

    def before_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Copy what users wrote into `parameters` to their stored tensors. Called before an optimizer steps those."""
        if self.inner:
            self.inner.before_optimizer_step(parameters)

    def after_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update `parameters` from their stored tensors. Called after an optimizer has stepped those."""
        if self.inner:
            self.inner.after_optimizer_step(parameters)

    def close(self) -> None:
        """Remove what the step attached to the model."""
        if self.inner:
            self.inner.close()


class WrappedStep(Step):
    """A step around an inner step, to which all methods that are not overridden delegate."""

    inner: Step

    def __init__(self, inner: Step) -> None:
        self.inner = inner
        self.synced = True  # whether the next backward pass ends with gradients of the global batch

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """See `Step.unsynced`."""
        self.synced = False
        try:
            with self.inner.unsynced():
                yield
        finally:
            self.synced = True
