"""Over how much a step's losses are means, so that parts of a batch can be put together to the mean of all of it.

A cross-entropy leaves out ignored targets, and a mean over elements or rows counts as many as there are. The mean over
a batch that ranks or microbatches share is the sum of all their numerators over the sum of all their counts:

    mean = sum_r count_r mean_r / sum_r count_r

So the gradient of each mean is multiplied where the mean was computed, by a `Scale` that is filled in when all counts
are known. Any sum of means then has the gradient of the whole batch, each of them counting in its own way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from typing_extensions import Self

from lightning_parallel.techniques.step import Run
from lightning_parallel.techniques.tools.losses import Watched, unwatch, watch
from lightning_parallel.techniques.tools.reach import is_made_of, linear_nodes, multiples_in
from lightning_parallel.values import children_of, holds_alike, tensors_of

T = TypeVar("T")

FREED = (
    "what this value counts over cannot be seen any more: the graph that it comes from was freed by a backward; call "
    "self.manual_backward(loss) in place of loss.backward(), or log the value before"
)


class Scale:
    """The factor by which a gradient is multiplied; none as long as it is not known, and while it rests."""

    def __init__(self, factor: Tensor | None = None) -> None:
        self.factor = factor
        self.rests = False

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
        gradient, scale = incoming[0], ctx.scale
        known = scale.factor is not None and not scale.rests
        return (gradient * scale.factor.to(gradient.dtype) if known else gradient), None


def scaled(value: Tensor, scale: Scale) -> Tensor:
    """The number, whose gradient is multiplied by the scale."""
    result: Tensor = _Scaled.apply(value, scale)  # type: ignore[no-untyped-call]
    return result


class Over(NamedTuple):
    """Over how much a mean is in one part of a batch, or several means together; tensors in float64, or numbers.

    The sum in a part is its mean times `divisor`; the mean of all parts is the sum of these over that of the counts.

    Attributes:
        count: of what it is over.
        divisor: of its sum. It is the count, unless a step takes another number where that is nothing.
        floor: the least by which the sum of all parts is divided.
    """

    count: Any
    divisor: Any
    floor: float = 0.0

    @classmethod
    def of_all(cls, overs: Sequence[Over]) -> Over:
        """Over how much several means of one part are together."""
        counts, divisors, floors = zip(*overs, strict=True)
        if len(overs) > 1 and any(floors):  # no floor is that of all: parts weigh as much as they were divided by
            counts, floors = divisors, (0.0,)
        return cls(sum(counts), sum(divisors), max(floors))

    @property
    def excess(self) -> float:
        """How much larger than its mean that of the batch is, in numbers, where pieces were divided by a floor each."""
        least = max(self.count, self.floor)
        return float(self.divisor / least) if least else 1.0


@dataclass(frozen=True)
class Mean:
    """A mean that a step computed.

    Attributes:
        over: over how much.
        value: the mean.
        given: what the step got: equal to it, and perhaps changed in place since.
        edge: where it came from in the graph; None without gradients.
        scale: of its gradient.
        sum: the scale of a gradient that is the sum over all that it counts, and is to become the mean over all ranks'.
        by: stands for the calls that led to it.
        of: stands for the targets.
        targets: these, where a loss function got them.
    """

    over: Over
    value: Tensor
    given: Tensor
    edge: GradientEdge | None
    scale: Scale
    by: int
    of: int
    by_hand: bool = False
    targets: Tensor | None = None
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
    #: numbers without gradient, each with what was divided by what; whether these are means is not known here
    quotients: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    #: plain means without gradient, each with the number of its elements
    averages: list[tuple[Tensor, int]] = field(default_factory=list)
    of_logged: int = 0  #: how many of `all` were noted of what the step logged
    #: of `all`, where these are some of more
    _numbers: Sequence[int] | None = None
    _others: list[tuple[Tensor, int]] = field(default_factory=list)
    _kept: list[tuple[GradientEdge, dict[int, Tensor]]] = field(default_factory=list)
    _floors: list[tuple[Tensor, Tensor, float]] = field(default_factory=list)
    _watched: list[Watched] = field(default_factory=list)

    # ---------------------------------------------------------------- watching

    def begin(self) -> None:
        """Starts to note the means that the step computes."""
        self._watched.append(watch(self))

    def end(self) -> None:
        """Stops, if it began."""
        if self._watched:
            unwatch(self._watched.pop())

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def note(
        self,
        mean: Tensor,
        count: Tensor,
        of: Tensor | None = None,
        by_hand: bool = False,
        divisor: Tensor | None = None,
        floor: float = 0.0,
    ) -> Tensor:
        """A mean over so much was computed, `of` these targets; returns what the step is to use for it. See `Over`."""
        scale, count = Scale(), count.detach().double()
        given: Tensor = _Scaled.apply(mean, scale) if mean.requires_grad else mean.clone()  # type: ignore[no-untyped-call]
        edge = get_gradient_edge(given) if given.requires_grad else None
        targets = len(self.all) if by_hand else 0 if of is None else of.data_ptr()
        over = Over(count, count if divisor is None else divisor.detach().double(), floor)
        self.all.append(Mean(over, mean.detach(), given, edge, scale, _place(), targets, by_hand, of))
        return given

    def floored(self, number: Tensor, result: Tensor, floor: float) -> None:
        """A number was kept from being less than so much, perhaps to be divided by."""
        self._floors.append((number, result, floor))

    def floor_of(self, divisor: Any) -> tuple[Tensor, float] | None:
        """The number that a divisor is without its floor, and the floor; None without one."""
        return next(((number, floor) for number, result, floor in self._floors if result is divisor), None)

    def also(self, value: Tensor, number: int = 0) -> None:
        """A value is a mean over the same as mean `number`."""
        self._others.append((value, number))

    def declare(self, over: Over, device: torch.device) -> None:
        """A mean over so much was computed elsewhere; values of it are given to `also` and `scaled`."""
        nothing = torch.zeros((), device=device)
        count, divisor = (torch.tensor(each, dtype=torch.float64, device=device) for each in over[:2])
        own = Scale.to_mean(max(over.count, over.floor), device)  # until all ranks have told their counts
        self.all.append(Mean(Over(count, divisor, over.floor), nothing, nothing, None, Scale(), 0, 0, sum=own))

    def scaled(self, value: Tensor, number: int = 0) -> Tensor:
        """A value that is mean `number`, to be differentiated; its gradient is that of a sum, see `Mean`."""
        result = scaled(value, self.all[number].sum)
        self.also(result, number)
        return result

    @property
    def numbers(self) -> Sequence[int]:
        """The number of each of `all`, as values tell by it what is made of a mean."""
        return range(len(self.all)) if self._numbers is None else self._numbers

    @property
    def that_learn(self) -> Means:
        """Those with a gradient, by their numbers."""
        numbers = [number for number, mean in enumerate(self.all) if mean.edge is not None]
        return Means(self.elements, self.batch, [self.all[number] for number in numbers], _numbers=numbers)

    def of_single_samples(self, samples: int | None) -> frozenset[int]:
        """The numbers of those that one place computed for each sample by itself: a mean of them counts samples."""
        found: dict[int, list[int]] = {}
        for number, mean in enumerate(self.all):
            found.setdefault(mean.by, []).append(number)
        if samples is None or samples < 2:
            return frozenset()
        alike = [each for each in found.values() if samples == len(each) == len({self.all[k].of for k in each})]
        targets = {k: of for each in alike for k in each if (of := self.all[k].targets) is not None}
        wholes = _by_memory(self.batch, samples) if targets else {}
        several = {number for number, of in targets.items() if _is_of_several(of, samples, wholes)}
        return frozenset(number for each in alike if several.isdisjoint(each) for number in each)

    # ---------------------------------------------------------------- what was seen

    @property
    def counting(self) -> list[Mean]:
        """Those by which a loss counts as a whole: torch's own go before those made by hand."""
        awake = [mean for mean in self.all if not mean.scale.rests]
        return [mean for mean in awake if not mean.by_hand] or awake

    def make_all_of(self, loss: Tensor) -> bool:
        """Whether a loss is a sum of multiples of the means by which it counts, and of nothing else that learns."""
        return is_made_of(loss.grad_fn, [mean.edge for mean in self.counting])

    @property
    def over(self) -> Over | None:
        """Over how much all means are by which a loss counts, None where there is none."""
        chosen = self.counting
        return Over.of_all([mean.over for mean in chosen]) if chosen else None

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
        for node in linear_nodes(loss.grad_fn, self.edges):
            self._kept.append((GradientEdge(node, 0), self._multiples(node)))

    def rest_within(self, loss: Tensor, together: bool = False) -> None:
        """Lets means rest by which a loss does not count.

        Those by hand of which it is no sum of multiples: what a model divides within is no mean. Where all means of a
        loss count as one, as parts of a batch do, also those that are none of the loss's, as of a metric, and those by
        hand unless it has no other part.

        Args:
            loss: goes backward next.
            together: whether all means of a loss count as one.
        """
        by_hand = any(mean.by_hand for mean in self.all)
        if not (self.all and loss.requires_grad):
            return
        if not (by_hand or (together and (len(self.all) > 1 or self._learns_nothing))):
            return
        parts = self._multiples(loss.grad_fn)
        of_these = not together or is_made_of(loss.grad_fn, self.edges)
        for number, mean in enumerate(self.all):
            if mean.by_hand:
                mean.scale.rests = not of_these or number not in parts
            elif together:
                mean.scale.rests = number not in parts and (bool(parts) or mean.edge is None)

    @property
    def _learns_nothing(self) -> bool:
        return all(mean.edge is None for mean in self.all)

    @property
    def edges(self) -> list[GradientEdge | None]:
        """Where the means, and what was made of them before a backward, come from in the graph."""
        return [*(mean.edge for mean in self.all), *(edge for edge, _ in self._kept)]

    def _multiples(self, node: Any) -> dict[int, Tensor]:
        """The factors of the means of which what a node makes is a sum of multiples, by their numbers."""
        try:
            found = multiples_in(node, self.edges)
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
            return self._step(*args, **kwargs)
        self._means.batch = args[0] if args else None
        watched = watch(self._means)
        try:
            return self._step(*args, **kwargs)
        finally:
            unwatch(watched)


def _tensors_in(batch: Any, samples: int) -> Iterator[tuple[Tensor, bool]]:
    """The tensors of a batch with a row for each sample, and those in lists with an item for each, which are of one."""
    if isinstance(batch, Tensor):
        if batch.dim() and len(batch) == samples:
            yield batch, False
    elif holds_alike(batch) and len(batch) == samples:
        yield from ((tensor, True) for tensor in tensors_of(batch) if tensor.dim())
    else:
        for child in children_of(batch):
            yield from _tensors_in(child, samples)


def _by_memory(batch: Any, samples: int) -> dict[int, tuple[Tensor, bool]]:
    """Those of `_tensors_in`, by their memory; of several in the same memory the first."""
    found: dict[int, tuple[Tensor, bool]] = {}
    for tensor, is_of_one in _tensors_in(batch, samples):
        found.setdefault(tensor.untyped_storage().data_ptr(), (tensor, is_of_one))
    return found


def _is_of_several(targets: Tensor, samples: int, wholes: Mapping[int, tuple[Tensor, bool]]) -> bool:
    """Whether targets are those of several samples, as of one head of as many as there are samples."""
    if (found := wholes.get(targets.untyped_storage().data_ptr())) is None:
        return targets.shape[:1] == (samples,)  # nothing tells of copies but their size
    whole, is_of_one = found
    start, row = targets.storage_offset() - whole.storage_offset(), max(whole.stride(0), 1)
    extent = sum((n - 1) * step for n, step in zip(targets.shape, targets.stride(), strict=True))
    return not is_of_one and start // row != (start + extent) // row


def is_among(value: Tensor, means: Sequence[Tensor]) -> bool:
    """Whether a value is one of the means, perhaps detached."""
    return any(value.data_ptr() == mean.data_ptr() for mean in means)


def _place() -> int:
    """Stands for the calls by which a mean was computed, the same in a loop, and others where a line has two."""
    frame, calls = sys._getframe(1), []
    while frame is not None:
        calls.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    return hash(tuple(calls))
