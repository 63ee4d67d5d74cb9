"""Steps: the user's own step, and what techniques do around a batch."""

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
"""The user's `training_step` or one of its siblings; it may be called several times for one batch."""

Silent = Callable[[], AbstractContextManager["UndoneWrites | None"]]


class BatchRecords:
    """What the user's step logs and keeps in the microbatches of one batch. This class keeps nothing."""

    def track_buffers(self, buffers: Sequence[str]) -> None:
        """Let all calls together update these replicated buffers once for the batch."""

    def collect(self, means: Sequence[Sequence[Tensor]] = (), targets: float | None = None) -> Any:
        """The records of all calls, to be sent to ranks that did not see the step to its end.

        `means` are by call its losses and other values that are averaged alike, over so many `targets` or samples.
        """

    def replay(self, records: Any) -> None:
        """Logs and keeps on this rank what was collected, perhaps on another one."""

    def scale_means(self, means: Means) -> None:
        """Set the gradient scale of each recorded mean. Collective over the ranks that read different samples.

        Called for a backward pass that runs before `Step.backward`.
        """

    def normalize_loss(self, loss: Tensor) -> Tensor:
        """The loss of the batch, whose gradient, a sum over the collected targets, becomes a mean over all of them."""
        return loss


@dataclass(frozen=True)
class BatchContext:
    """Facts about a batch, known when it begins."""

    index: int = 0  # how many batches of training came before it
    weight: float = 1.0  # how much this rank's samples count, 1 on average over ranks; 0.0 if it has none of its own
    # the least number of samples of the ranks that communicate within the forward; None if none do
    samples: int | None = None
    # by what the loss will be multiplied before backward, for steps that compute gradients before that
    scale: float = 1.0
    # whether no other rank has samples of this batch, so that what has no target here has none at all
    alone: bool = True
    # takes what the step logs, where it runs on microbatches
    records: BatchRecords = field(default_factory=BatchRecords)
    # makes a context in which the step leaves no trace in logs, metrics, tensors and random states
    silent: Silent = nullcontext


class Step:
    """The way of one batch: forward, backward, and the parameters as they are kept between steps.

    This class without an `inner` step is the single-device step. A technique that acts during the step subclasses
    `WrappedStep`; the inner step does what the subclass does not override.
    """

    inner: Step | None = None

    @property
    def applies_sample_weight(self) -> bool:
        """True if gradients have the weight of `BatchContext`, so that the loss must not be multiplied by it."""
        return self.inner is not None and self.inner.applies_sample_weight

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """Run the user's own `training_step` (or validation, test, predict) with its arguments."""
        return self.inner.forward(run, *args, **kwargs) if self.inner else run(*args, **kwargs)

    def begin_batch(self, batch: BatchContext) -> None:
        """Take what is known of the next batch."""
        if self.inner:
            self.inner.begin_batch(batch)

    def backward(self, run: Callable[[], None]) -> None:
        """Run the backward pass; afterwards gradients are those of the global batch, unless inside `unsynced`."""
        return self.inner.backward(run) if self.inner else run()

    def unsynced(self) -> AbstractContextManager[None]:
        """Let the backward passes inside only accumulate: a later one communicates for all of them."""
        return nullcontext()

    def stored(self, parameter: nn.Parameter) -> Tensor:
        """The tensor that the optimizer steps for `parameter`: itself, or the shard of it that this rank keeps."""
        return self.inner.stored(parameter) if self.inner else parameter

    def accumulated(self, parameter: nn.Parameter) -> Tensor:
        """The tensor as large as which a gradient is while it accumulates: `parameter`, or what is stored for it."""
        return self.inner.accumulated(parameter) if self.inner else parameter

    def average_given(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average gradients that no backward computed, before an optimizer steps in manual optimization.

        A step may compute them by `torch.autograd.grad` and set them itself. Collective over all ranks.
        """
        if self.inner:
            self.inner.average_given(parameters)

    def gathered(self) -> list[Tensor]:
        """Tensors whose memory is allocated and filled in a step, where ranks gather parameters."""
        return self.inner.gathered() if self.inner else []

    def gather_anew(self) -> None:
        """Take back what the user's step wrote into gathered parameters. Collective over the ranks that share them."""
        if self.inner:
            self.inner.gather_anew()

    def shard_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Cut whole gradients, which hooks put in the place of sharded ones, to this rank's part. No message."""
        if self.inner:
            self.inner.shard_gradients(parameters)

    def before_backward(self) -> None:
        """Called in manual optimization before `backward`, so that gradients are as the step has left them."""
        if self.inner:
            self.inner.before_backward()

    def before_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Called before an optimizer changes what is stored for `parameters`, so that it follows what users wrote."""
        if self.inner:
            self.inner.before_optimizer_step(parameters)

    def after_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Called when an optimizer changed what is stored for `parameters`, so that they follow."""
        if self.inner:
            self.inner.after_optimizer_step(parameters)

    @property
    def findings(self) -> frozenset[str]:
        """What batches have shown so far by which later ones round otherwise; a checkpoint keeps it."""
        return self.inner.findings if self.inner else frozenset()

    def recall(self, findings: frozenset[str]) -> None:
        """Before a run goes on from a checkpoint: `findings` of all ranks then, perhaps on another layout."""
        if self.inner:
            self.inner.recall(findings)

    def close(self) -> None:
        """Take back what the step attached to the model."""
        if self.inner:
            self.inner.close()


class WrappedStep(Step):
    """A step around another one; whatever it does not override, the inner step does."""

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
