"""Runs and steps: the user's own step, and what techniques do around it and around a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from torch import Tensor, nn
from typing_extensions import Self

from lightning_parallel.techniques.tools import microbatches

if TYPE_CHECKING:
    from lightning_parallel.techniques.tools.means import Means, Over

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Run(Generic[T_co]):
    """The user's own step as a strategy hands it to `Step.forward`; it may be called several times for one batch.

    Args:
        step: the user's `training_step`, or one of its siblings.
    """

    def __init__(self, step: Callable[..., T_co]) -> None:
        self._step = step

    def __call__(self, *args: Any, **kwargs: Any) -> T_co:
        """Runs the step on a batch or a part of it."""
        return self._step(*args, **kwargs)

    def __enter__(self) -> Self:
        """Before the first call for a batch."""
        return self

    def __exit__(self, *_: object) -> None:
        """After the last one."""

    @property
    def batches_before(self) -> int:
        """How many batches of training came before this one."""
        return 0

    def show(self) -> None:
        """Within a call: what looks whole is shown also for parameters of which ranks have parts since it began."""

    def keeps(self, buffers: Sequence[str]) -> None:
        """Before the first call: these buffers every rank has, and what the calls make of them is that of one batch."""

    def handed_on(self, value: Any) -> Any:
        """What a stage of a pipeline gives to the next one, as plain tensors and plain values."""
        return value

    def received(self, value: Any) -> Any:
        """What the stage before gave, as it was there. Opposite of `handed_on`."""
        return value

    def notes(
        self, shares: Sequence[float] = (), means: Sequence[Sequence[Tensor]] = (), targets: Over | None = None
    ) -> Any:
        """Notes of the calls, to be sent to ranks that did not see the step to its end.

        Args:
            shares: what the loss of each call counts for in that of the batch.
            means: of each call, its losses, and what else is to be averaged as they are.
            targets: over how many of them all these are means; None where they are means over samples.
        """

    def merged(
        self, outputs: Sequence[Any], sizes: Sequence[int], shares: Sequence[float], means: Sequence[Sequence[Tensor]]
    ) -> Any:
        """What the step would return for the whole batch.

        Args:
            outputs: what it returned, in the order of the calls.
            sizes: how many samples each call had.
            shares: see `notes`.
            means: see `notes`.
        """
        return microbatches.merge(outputs, sizes)

    def replay(self, notes: Any) -> None:
        """Does on this rank once what was noted, perhaps on another one."""

    def scale(self, means: Means) -> None:
        """Fills in by what the gradients of means are multiplied that one call computed of the whole batch.

        All ranks that read different samples call this, for a backward pass that runs before `Step.backward` does.
        """

    def counted(self, loss: Tensor, summed: bool) -> Tensor:
        """The loss of the batch, which counts by the targets that were noted.

        Args:
            loss: of the batch.
            summed: whether its gradient is a sum over targets, and is to become a mean over those of all ranks.
        """
        return loss


class WrappedRun(Run[T_co]):
    """A run around another one; a technique that acts around each call of the user's step overrides `__call__`."""

    def __init__(self, inner: Run[T_co]) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> T_co:
        """See `Run.__call__`."""
        return self.inner(*args, **kwargs)

    def __enter__(self) -> Self:
        """See `Run.__enter__`."""
        self.inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """See `Run.__exit__`."""
        self.inner.__exit__(*error)

    @property
    def batches_before(self) -> int:
        """See `Run.batches_before`."""
        return self.inner.batches_before

    def show(self) -> None:
        """See `Run.show`."""
        self.inner.show()

    def keeps(self, buffers: Sequence[str]) -> None:
        """See `Run.keeps`."""
        self.inner.keeps(buffers)

    def handed_on(self, value: Any) -> Any:
        """See `Run.handed_on`."""
        return self.inner.handed_on(value)

    def received(self, value: Any) -> Any:
        """See `Run.received`."""
        return self.inner.received(value)

    def notes(
        self, shares: Sequence[float] = (), means: Sequence[Sequence[Tensor]] = (), targets: Over | None = None
    ) -> Any:
        """See `Run.notes`."""
        return self.inner.notes(shares, means, targets)

    def merged(
        self, outputs: Sequence[Any], sizes: Sequence[int], shares: Sequence[float], means: Sequence[Sequence[Tensor]]
    ) -> Any:
        """See `Run.merged`."""
        return self.inner.merged(outputs, sizes, shares, means)

    def replay(self, notes: Any) -> None:
        """See `Run.replay`."""
        self.inner.replay(notes)

    def scale(self, means: Means) -> None:
        """See `Run.scale`."""
        self.inner.scale(means)

    def counted(self, loss: Tensor, summed: bool) -> Tensor:
        """See `Run.counted`."""
        return self.inner.counted(loss, summed)


class EarlyReduction(Protocol):
    """Reduces gradients that a forward computed, before backward has said by what they are multiplied."""

    def wants(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient of a parameter may be reduced in this forward."""

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Takes a gradient that will not grow any more; nobody else has it from here on.

        Args:
            parameter: one that is wanted.
            gradient: of what this rank keeps of it, summed over the batch; plain and dense.
        """

    def lacks(self, parameter: nn.Parameter) -> None:
        """A parameter that is wanted has no gradient in this batch."""

    def multiply(self, factor: float) -> None:
        """In backward, before it gives other parameters theirs: the same on all ranks, for all that was taken."""


@dataclass(frozen=True)
class Coming:
    """Facts about a batch that are known before its forward.

    Attributes:
        scale: by what the loss will be multiplied before backward, for steps that compute gradients before that.
        weight: how much this rank's samples count against those of other ranks on average; 0 for a rank for which none
            were left, which has one for the form.
        layout: where samples are in the batch.
        samples: the least number of samples that a rank has which meets this one within the forward; None: nobody does.
        alone: whether no other rank has samples of this batch, so that what has no target here has none at all.
        one_factor: whether nothing stands between the step and backward that could multiply the loss by something that
            differs between ranks.
        early: who wants gradients that the forward computes.
        asks: whether the step may look at gradients, as one does that runs its backward itself.
        release: sets to zero, before its time, what is in `grad` from the batch before; None: it still grows, or
            somebody may look at it between the step and backward.
    """

    scale: float = 1.0
    weight: float = 1.0
    layout: microbatches.Layout = None
    samples: int | None = None
    alone: bool = True
    one_factor: bool = False
    early: tuple[EarlyReduction, ...] = ()
    asks: bool = False
    release: Callable[[], None] | None = None

    @property
    def counts(self) -> bool:
        """Whether this rank's samples count."""
        return self.weight > 0


class Step:
    """The way of one batch: forward, backward, and the parameters as they are kept between steps.

    This class is the single-device step. A technique that acts during the step wraps it: it subclasses, keeps the
    step it got as `inner`, and calls it.
    """

    @property
    def weighs(self) -> bool:
        """Whether gradients have the weight of `expect` by themselves, and the loss is not to be multiplied by it."""
        return False

    @property
    def turns(self) -> Mapping[nn.Parameter, int]:
        """Parameters whose gradients are final within the forward, and in which order: equal numbers together."""
        return {}

    def forward(self, run: Run[T], *args: Any, **kwargs: Any) -> T:
        """Runs the user's own `training_step` (or validation, test, predict) with its arguments."""
        return run(*args, **kwargs)

    def expect(self, coming: Coming) -> None:
        """Tells what is known of the next batch."""

    def backward(self, run: Callable[[], None]) -> None:
        """Runs the backward pass; afterwards gradients are those of the global batch, unless inside `unsynced`."""
        run()

    def unsynced(self) -> AbstractContextManager[None]:
        """The backward passes inside only accumulate: a later one communicates for all of them."""
        return nullcontext()

    def stored(self, parameter: nn.Parameter) -> Tensor:
        """The tensor that the optimizer steps for `parameter`: itself, or the shard of it that this rank keeps."""
        return parameter

    def accumulated(self, parameter: nn.Parameter) -> Tensor:
        """The tensor as large as which a gradient is while it accumulates: `parameter`, or what is stored for it."""
        return parameter

    def average_given(self, parameters: Sequence[nn.Parameter]) -> None:
        """Called in manual optimization before an optimizer steps: gradients that no backward computed become means.

        A step may compute them by `torch.autograd.grad` and set them itself. All ranks must call.
        """

    def before_backward(self) -> None:
        """Called in manual optimization before `backward`, so that gradients are as the step has left them."""

    def before_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Called before an optimizer changes what is stored for `parameters`, so that it follows what users wrote."""

    def after_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Called when an optimizer changed what is stored for `parameters`, so that they follow."""

    @property
    def findings(self) -> frozenset[str]:
        """What batches have shown so far by which later ones round otherwise; a checkpoint keeps it."""
        return frozenset()

    def recall(self, findings: frozenset[str]) -> None:
        """Before a run goes on from a checkpoint: `findings` of all ranks then, perhaps on another layout."""

    def close(self) -> None:
        """Takes back what the step attached to the model."""


class WrappedStep(Step):
    """A step around another one; whatever it does not override, the inner step does.

    Attributes:
        synced: whether the next backward pass ends with gradients of the global batch: not inside `unsynced`.
    """

    def __init__(self, inner: Step) -> None:
        self.inner = inner
        self.synced = True

    @property
    def weighs(self) -> bool:
        """See `Step.weighs`."""
        return self.inner.weighs

    @property
    def turns(self) -> Mapping[nn.Parameter, int]:
        """See `Step.turns`."""
        return self.inner.turns

    def forward(self, run: Run[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`."""
        return self.inner.forward(run, *args, **kwargs)

    def expect(self, coming: Coming) -> None:
        """See `Step.expect`."""
        self.inner.expect(coming)

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        self.inner.backward(run)

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """See `Step.unsynced`."""
        self.synced = False
        try:
            with self.inner.unsynced():
                yield
        finally:
            self.synced = True

    def stored(self, parameter: nn.Parameter) -> Tensor:
        """See `Step.stored`."""
        return self.inner.stored(parameter)

    def accumulated(self, parameter: nn.Parameter) -> Tensor:
        """See `Step.accumulated`."""
        return self.inner.accumulated(parameter)

    def average_given(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.average_given`."""
        self.inner.average_given(parameters)

    def before_backward(self) -> None:
        """See `Step.before_backward`."""
        self.inner.before_backward()

    def before_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.before_optimizer_step`."""
        self.inner.before_optimizer_step(parameters)

    def after_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.after_optimizer_step`."""
        self.inner.after_optimizer_step(parameters)

    @property
    def findings(self) -> frozenset[str]:
        """See `Step.findings`."""
        return self.inner.findings

    def recall(self, findings: frozenset[str]) -> None:
        """See `Step.recall`."""
        self.inner.recall(findings)

    def close(self) -> None:
        """See `Step.close`."""
        self.inner.close()
