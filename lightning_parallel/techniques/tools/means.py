"""Over how much a step's losses are means, so that parts of a batch can be put together to the mean of all of it.

A cross-entropy leaves out ignored targets, and a mean over elements or rows counts as many as there are. The mean over
a batch that ranks or microbatches share is the sum of all their numerators over the sum of all their counts:

    mean = sum_r count_r mean_r / sum_r count_r

So the gradient of each mean is multiplied where the mean was computed, by a `Scale` that is filled in when all counts
are known. Any sum of means then has the gradient of the whole batch, each of them counting in its own way.

torch's own loss functions are watched, by replacing them for the time of a step: a `TorchFunctionMode` would do the
same and make every other operation twice as expensive for the host.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from typing_extensions import Self

from lightning_parallel.techniques.step import Run
from lightning_parallel.techniques.tools.reach import linear_nodes, multiples_in

T = TypeVar("T")

NONE, MEAN, SUM = 0, 1, 2
"""The reductions as torch numbers them."""

WATCHING: ContextVar[Means | None] = ContextVar("means", default=None)
"""What notes the means of the step that runs in this thread; losses of other threads are no concern of it."""


FREED = (
    "what this value counts over cannot be seen any more: the graph that it comes from was freed by a backward; call "
    "self.manual_backward(loss) in place of loss.backward(), or log the value before"
)


class Scale:
    """The factor by which a gradient is multiplied; none as long as it is not known."""

    def __init__(self, factor: Tensor | None = None) -> None:
        self.factor = factor

    @classmethod
    def to_mean(cls, count: float, device: torch.device) -> Scale:
        """Makes the gradient of a mean of that of a sum over so much, and zero of one over nothing."""
        return cls(torch.tensor(1 / count if count else 0.0, dtype=torch.float64, device=device))


class _Scaled(Function):
    """A number whose gradient is multiplied by a scale that is filled in later."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, scale: Scale) -> Tensor:
        """See `torch.autograd.Function`."""
        ctx.scale = scale
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        """See `torch.autograd.Function`."""
        gradient, factor = incoming[0], ctx.scale.factor
        return (gradient if factor is None else gradient * factor.to(gradient.dtype)), None


def scaled(value: Tensor, scale: Scale) -> Tensor:
    """The number, whose gradient is multiplied by the scale."""
    result: Tensor = _Scaled.apply(value, scale)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True)
class Mean:
    """A mean that a step computed.

    Attributes:
        count: over how much, in float64.
        value: the mean.
        given: what the step got: equal to it, and perhaps changed in place since.
        edge: where it came from in the graph; None without gradients.
        scale: of its gradient.
        sum: the scale of a gradient that is the sum over all that it counts, and is to become the mean over all ranks'.
        by: stands for the calls that led to it.
        of: stands for the targets.
    """

    count: Tensor
    value: Tensor
    given: Tensor
    edge: GradientEdge | None
    scale: Scale
    by: int
    of: int
    sum: Scale = field(default_factory=Scale)


@dataclass
class Means:
    """The means of one step, or of one part of it. Others that come with another count are told by `also`.

    Args:
        elements: whether means over elements and rows are noted, and not over targets only.
        batch: what the step runs on.
    """

    elements: bool = True
    batch: Any = None
    all: list[Mean] = field(default_factory=list)
    _others: list[tuple[Tensor, int]] = field(default_factory=list)
    _kept: list[tuple[GradientEdge, dict[int, Tensor]]] = field(default_factory=list)
    _before: list[Token[Means | None]] = field(default_factory=list)

    # ---------------------------------------------------------------- watching

    def begin(self) -> None:
        """Starts to watch the means that torch's losses compute."""
        self._before.append(WATCHING.set(self))
        for loss in LOSSES:
            setattr(loss.owner, loss.name, _watched(loss, getattr(loss.owner, loss.name)))

    def end(self) -> None:
        """Stops watching, if it began."""
        if self._before:
            for loss in LOSSES:
                setattr(loss.owner, loss.name, getattr(loss.owner, loss.name).__wrapped__)
            WATCHING.reset(self._before.pop())

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def note(self, mean: Tensor, count: Tensor, of: Tensor | None = None) -> Tensor:
        """A mean over so much was computed, `of` these targets; returns what the step is to use for it."""
        scale = Scale()
        given: Tensor = _Scaled.apply(mean, scale) if mean.requires_grad else mean.clone()  # type: ignore[no-untyped-call]
        edge = get_gradient_edge(given) if given.requires_grad else None
        self.all.append(Mean(count.detach().double(), mean.detach(), given, edge, scale, *_origin(of)))
        return given

    def also(self, value: Tensor, number: int = 0) -> None:
        """A value is a mean over the same as mean `number`."""
        self._others.append((value, number))

    def declare(self, count: float, device: torch.device) -> None:
        """A mean over so much was computed elsewhere; values of it are given to `also` and `scaled`."""
        nothing = torch.zeros((), device=device)
        number = torch.tensor(count, dtype=torch.float64, device=device)
        own = Scale.to_mean(count, device)  # until all ranks have told their counts
        self.all.append(Mean(number, nothing, nothing, None, Scale(), 0, 0, own))

    def scaled(self, value: Tensor, number: int = 0) -> Tensor:
        """A value that is mean `number`, to be differentiated; its gradient is that of a sum, see `Mean`."""
        result = scaled(value, self.all[number].sum)
        self.also(result, number)
        return result

    def of_single_samples(self, samples: int | None) -> frozenset[int]:
        """The numbers of those that one place computed for each sample by itself: a mean of them counts samples."""
        targets: dict[int, set[int]] = {}
        for mean in self.all:
            targets.setdefault(mean.by, set()).add(mean.of)
        calls = Counter(mean.by for mean in self.all)
        single = {by for by, n in calls.items() if samples is not None and 1 < samples == n == len(targets[by])}
        return frozenset(number for number, mean in enumerate(self.all) if mean.by in single)

    # ---------------------------------------------------------------- what was seen

    @property
    def count(self) -> Tensor | None:
        """The sum of the counts of all means, None where there is none."""
        return torch.stack([mean.count for mean in self.all]).sum() if self.all else None

    @property
    def values(self) -> list[Tensor]:
        """The values of all means, as the step got them."""
        return [mean.given for mean in self.all]

    def parts_of(self, value: Tensor) -> dict[int, Tensor]:
        """Contributions of the means to a value that is a sum of multiples of them and of others, by their numbers."""
        for other, number in self._others:
            if value.data_ptr() == other.data_ptr():
                return {number: value.detach()}
        for number, mean in enumerate(self.all):
            if value.data_ptr() == mean.given.data_ptr() and not mean.given._version:
                return {number: mean.value}
        if not self.all or not value.requires_grad or value.dim():
            return {number: value.detach() for number, mean in enumerate(self.all) if is_among(value, [mean.given])}
        return {number: factor * self.all[number].value for number, factor in self._multiples(value.grad_fn).items()}

    def before_backward(self, loss: Tensor) -> None:
        """A loss goes backward before everything is logged: what its graph tells of means is kept, for it is freed."""
        for node in linear_nodes(loss.grad_fn, self._edges()):
            self._kept.append((GradientEdge(node, 0), self._multiples(node)))

    def _edges(self) -> list[GradientEdge | None]:
        return [*(mean.edge for mean in self.all), *(edge for edge, _ in self._kept)]

    def _multiples(self, node: Any) -> dict[int, Tensor]:
        """The factors of the means of which what a node makes is a sum of multiples, by their numbers."""
        try:
            found = multiples_in(node, self._edges())
        except RuntimeError as error:
            raise ValueError(FREED) from error
        total: dict[int, Tensor] = {}
        for number, factor in found.items():
            own = {number: torch.ones_like(factor)} if number < len(self.all) else self._kept[number - len(self.all)][1]
            total |= {mean: total.get(mean, 0) + factor * each for mean, each in own.items()}
        return total

    def counted(self, value: Tensor) -> Tensor:
        """The value with the contributions of means multiplied as their gradients are, its other parts as they are."""
        counted = value.detach()
        for number, part in self.parts_of(value).items():
            factor = self.all[number].scale.factor
            counted = counted if factor is None else counted + part * (factor - 1).to(part)
        return counted


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, means are of all ranks already: their gradients are not those of parts, to be scaled."""
    before = WATCHING.set(None)
    try:
        yield
    finally:
        WATCHING.reset(before)


class WatchedRun(Run[T]):
    """The user's step, with an eye on the means that it computes.

    Args:
        step: the user's.
        means: notes them; None where nobody asks.
    """

    def __init__(self, step: Callable[..., T], means: Means | None) -> None:
        super().__init__(step)
        self._means = means

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """See `Run.__call__`."""
        if self._means is None:
            return super().__call__(*args, **kwargs)
        self._means.batch = args[0] if args else None
        with self._means:
            return super().__call__(*args, **kwargs)


def is_among(value: Tensor, means: Sequence[Tensor]) -> bool:
    """Whether a value is one of the means, perhaps detached."""
    return any(value.data_ptr() == mean.data_ptr() for mean in means)


def mean_over(losses: Tensor, count: Tensor, dtype: torch.dtype, of: Tensor | None = None) -> Tensor:
    """The sum of losses over a count, noted as a mean; over nothing at all it is 0, not 0 / 0."""
    total = losses.sum(dtype=torch.float64 if losses.dtype == torch.float64 else torch.float32)
    means = WATCHING.get()
    if means is None:
        return (total / count).to(dtype)
    divisor = torch.where(count == 0, torch.ones_like(count), count).to(total.dtype)
    return means.note((total / divisor).to(dtype), count, of)


def mean_over_elements(mean: Tensor, count: int, of: Tensor | None = None) -> Tensor:
    """A mean over so many elements, noted where somebody asks for these."""
    means = WATCHING.get()
    if means is None or not means.elements:
        return mean
    return means.note(mean, torch.full((), count, dtype=torch.float64, device=mean.device), of)


# -------------------------------------------------------------------- torch's losses


def _of_targets(means: Means, function: Callable[..., Tensor], args: tuple[Any, ...], place: int) -> Tensor:
    logits, target, weight, _, ignored = args[:5]
    if target.is_floating_point():  # probabilities of classes
        return _of_elements(means, function, args, place, features=logits.shape[1 if logits.dim() > 1 else 0])
    counted = target != ignored
    # torch adds up the weights in their own dtype, and counts exactly
    count = counted.sum() if weight is None else (weight[target.masked_fill(~counted, 0)] * counted).sum()
    losses = function(*args[:place], NONE, *args[place + 1 :])
    return mean_over(losses, count, losses.dtype, of=target)


def _of_elements(
    means: Means, function: Callable[..., Tensor], args: tuple[Any, ...], place: int, features: int = 1
) -> Tensor:
    if not means.elements:
        return function(*args)
    count = args[0].numel() // max(features, 1)
    mean = function(*args[:place], MEAN if count else SUM, *args[place + 1 :])
    return mean_over_elements(mean, count, of=args[1])


@functools.cache  # made once, and not in every step
def _watched(loss: Loss, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        means = WATCHING.get()
        mean = len(args) > loss.place and args[loss.place] == MEAN
        if means is None or not mean or not _is_plain(args[0]):
            return function(*args, **kwargs)
        return loss.kind(means, partial(function, **kwargs), args, loss.place)

    return call


class Loss(NamedTuple):
    """A loss function of torch's: where it is found, at which place it takes its reduction, over what it is a mean."""

    owner: Any
    name: str
    place: int
    kind: Callable[[Means, Callable[..., Tensor], tuple[Any, ...], int], Tensor]

    @property
    def of_elements(self) -> bool:
        """Whether it is computed element by element."""
        return self.kind is _of_elements


NN: Any = torch._C._nn
LOSSES = (
    Loss(NN, "cross_entropy_loss", 3, _of_targets),
    Loss(NN, "nll_loss_nd", 3, _of_targets),
    *(Loss(NN, f"{name}_loss", 2, _of_elements) for name in ("mse", "l1", "smooth_l1", "huber", "soft_margin")),
    Loss(NN, "binary_cross_entropy", 3, _of_elements),
    Loss(torch, "binary_cross_entropy_with_logits", 4, _of_elements),
    Loss(torch, "kl_div", 2, _of_elements),
    Loss(torch, "poisson_nll_loss", 5, _of_elements),
)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has a value that is this step's: no fake one, and none of a transform such as `vmap`."""
    return type(tensor) in (Tensor, nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _origin(targets: Tensor | None) -> tuple[int, int]:
    """Stands for the lines from which a mean was computed, the same in a loop; and for its targets."""
    frame, lines = sys._getframe(1), []
    while frame is not None:
        lines.append((id(frame.f_code), frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return hash(tuple(lines)), 0 if targets is None else targets.data_ptr()
