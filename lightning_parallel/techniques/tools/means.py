"""Records over how much a step's losses are means, so that parts of a batch are put together to the mean of all of it.

Of a batch that ranks or microbatches share it is

    mean = sum_r count_r mean_r / sum_r count_r

So the gradient of each mean is multiplied where the mean was computed, by a `Scale` that is filled in when all counts
are known. Any sum of means then has the gradient of the whole batch, each of them counting in its own way.

Torch's loss functions tell by their inputs over how much they average, and means by hand are computed by `mean`. The
functions are replaced for the time of a step, in the modules where `torch.nn.functional` finds them: a
`TorchFunctionMode` makes every other operation twice as expensive for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from typing_extensions import Self

NONE, MEAN, SUM = 0, 1, 2
"""The reductions as torch numbers them."""


class Scale:
    """The factor by which a gradient is multiplied; None as long as it is not known."""

    def __init__(self, factor: Tensor | None = None) -> None:
        self.factor = factor

    @classmethod
    def to_mean(cls, count: float, device: torch.device) -> Scale:
        """Makes the gradient of a mean of that of a sum over so much, and zero of one over nothing."""
        return cls(torch.tensor(1 / count if count else 0.0, dtype=torch.float64, device=device))


class _Scaled(Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, scale: Scale) -> Tensor:
        ctx.scale = scale
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        gradient, factor = incoming[0], ctx.scale.factor
        return gradient if factor is None else gradient * factor.to(gradient.dtype), None


def scaled(value: Tensor, scale: Scale) -> Tensor:
    """Returns the number, with a gradient that is multiplied by a scale that may be filled in later."""
    result: Tensor = _Scaled.apply(value, scale)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True, eq=False)
class Mean:
    """A mean that a step computed."""

    count: Tensor  # over how much, in float64
    value: Tensor  # the mean
    given: Tensor  # what the step got: equal to it, and perhaps changed in place since
    edge: GradientEdge | None  # where it came from in the graph; None without gradients
    scale: Scale  # of its gradient
    total: Scale  # the scale of a gradient that is a sum over targets, and becomes the mean over those of all ranks


class Means:
    """The means of one step, or of one part of it, recorded while this is entered."""

    def __init__(self, elements: bool = True) -> None:
        self.elements = elements  # whether means over elements and rows are recorded, and not over targets only
        self.all: list[Mean] = []
        self._in_loss: list[Mean] | None = None
        self._freed: list[tuple[Tensor, dict[Mean, Tensor]]] = []
        self._entered: list[tuple[list[Any], Token[Means | None]]] = []

    def __enter__(self) -> Self:
        own = [vars(loss.owner)[loss.name] for loss in LOSSES]
        for loss, function in zip(LOSSES, own, strict=True):
            setattr(loss.owner, loss.name, _recorded(loss, function))
        self._entered.append((own, WATCHING.set(self)))
        return self

    def __exit__(self, *_: object) -> None:
        own, before = self._entered.pop()
        WATCHING.reset(before)
        for loss, function in zip(LOSSES, own, strict=True):
            setattr(loss.owner, loss.name, function)

    def note(self, mean: Tensor, count: Tensor | float, total: Scale | None = None) -> Tensor:
        """Records a mean over so much, whose gradient may be a sum (`Mean.total`); returns what the step is to use."""
        scale, count = Scale(), torch.as_tensor(count, dtype=torch.float64, device=mean.device).detach()
        given = scaled(mean, total or scale) if mean.requires_grad else mean.clone()
        edge = get_gradient_edge(given) if given.requires_grad else None
        self.all.append(Mean(count, mean.detach(), given, edge, scale, total or Scale()))
        return given

    def returned(self, loss: Tensor | None) -> None:
        """Tells of the loss that the step returned: as a whole it counts by the means of which it was computed."""
        if loss is not None and loss.requires_grad:
            self._in_loss = [*self._derivatives(loss)]

    def before_backward(self, loss: Tensor) -> None:
        """Keeps the parts of a loss that goes backward before everything is logged, for its graph is freed."""
        self._freed.append((loss.detach(), self.parts_of(loss)))

    @property
    def count(self) -> Tensor | None:
        """Over how much the loss of the step is a mean as a whole; None where it is made of no mean."""
        counts = [mean.count for mean in (self.all if self._in_loss is None else self._in_loss)]
        return torch.stack(counts).sum() if counts else None

    def parts_of(self, value: Tensor) -> dict[Mean, Tensor]:
        """Contributions of the means to a value that is a sum of multiples of them and of a rest."""
        for loss, parts in self._freed:
            if is_among(value, [loss]):
                return parts
        same = [mean for mean in self.all if is_among(value, [mean.given])]
        if same and not same[0].given._version:
            return {same[0]: same[0].value}
        if not value.requires_grad or value.dim():
            return {mean: value.detach() for mean in same}
        factors = self._derivatives(value)
        return {mean: each.detach() * mean.value for mean, each in factors.items() if not each.requires_grad}

    def _derivatives(self, value: Tensor) -> dict[Mean, Tensor]:
        """Derivatives of a value by the means that it depends on. One that needs no gradient is a constant factor."""
        edges = {mean: mean.edge for mean in self.all if mean.edge is not None}
        if not edges:
            return {}
        try:
            with torch.enable_grad(), torch._C.DisableTorchFunction():
                found = torch.autograd.grad(value, [*edges.values()], create_graph=True, allow_unused=True)
        except RuntimeError as error:
            raise ValueError(
                "what this value counts over cannot be seen any more: its graph was freed by a backward; log it before "
                "that, or log the loss itself after self.manual_backward(loss), not after loss.backward()"
            ) from error
        return {mean: each for mean, each in zip(edges, found, strict=True) if each is not None}


def is_among(value: Tensor, means: Sequence[Tensor]) -> bool:
    """Whether a value is one of the means, perhaps detached."""
    return any(value.data_ptr() == mean.data_ptr() for mean in means)


WATCHING: ContextVar[Means | None] = ContextVar("means", default=None)
"""What records the means of the step that runs in this thread; losses of other threads are no concern of it."""


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, means are none of the step's: they are of all ranks already, or parts of what is recorded itself."""
    before = WATCHING.set(None)
    try:
        yield
    finally:
        WATCHING.reset(before)


def mean(total: Tensor, count: Tensor | float) -> Tensor:
    """Divides a total by a count, as the mean over all of the batch, also what other ranks and microbatches have.

    Torch's own losses, as `F.cross_entropy(..., ignore_index=0)`, count by their targets without this function. A mean
    that a step computes by hand counts by samples, as under DDP, unless it is computed by this function:

        loss = lp.mean((losses * mask).sum(), mask.sum())

    Losses of torch's within the total then count by it only. Outside of a step this is `total / count`. The count needs
    no `clamp(min=1)`: the mean of a part of the batch that has nothing to count is 0.

    Args:
        total: a sum over what counts; one number.
        count: how much counts. No gradient goes through it.
    """
    if total.dim():
        raise ValueError(f"lp.mean divides one number, and got a total of shape {tuple(total.shape)}: sum it up before")
    means = None if torch.compiler.is_dynamo_compiling() else WATCHING.get()
    if means is None or not _is_plain(total):
        return total / count
    if total.requires_grad:  # means of which the total is made, as those of each sample, count by it only
        within = means._derivatives(total)
        means.all = [each for each in means.all if each not in within]
    total = total if total.is_floating_point() else total.to(torch.get_default_dtype())
    return mean_over(total, torch.as_tensor(count, device=total.device).detach(), total.dtype)


def mean_over(total: Tensor, count: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a sum divided by a count, recorded as a mean; over nothing at all it is 0, not 0 / 0."""
    means = WATCHING.get()
    if means is None:
        return (total / count).to(dtype)
    return means.note((total / count.masked_fill(count == 0, 1).to(total.dtype)).to(dtype), count)


def mean_over_elements(mean: Tensor, count: int) -> Tensor:
    """Returns a mean over so many elements, recorded where means over elements are."""
    means = WATCHING.get()
    return mean if means is None or not means.elements else means.note(mean, count)


class Loss(NamedTuple):
    """A loss function of torch's: where it is found, at which place it takes its reduction, over what it is a mean."""

    owner: Any
    name: str
    place: int
    over: str


NN: Any = torch._C._nn
OF_ELEMENTS = {"binary_cross_entropy_with_logits": 4, "kl_div": 2, "poisson_nll_loss": 5, "hinge_embedding_loss": 3,
               "margin_ranking_loss": 4}  # fmt: skip
OF_ROWS = {"cosine_embedding_loss": 4, "triplet_margin_loss": 7}
LOSSES = (
    Loss(NN, "cross_entropy_loss", 3, "targets"),
    Loss(NN, "nll_loss_nd", 3, "targets"),
    *(Loss(NN, f"{name}_loss", 2, "elements") for name in ("mse", "l1", "smooth_l1", "huber", "soft_margin")),
    Loss(NN, "binary_cross_entropy", 3, "elements"),
    *(Loss(torch, name, place, "elements") for name, place in OF_ELEMENTS.items()),
    *(Loss(torch, name, place, "rows") for name, place in OF_ROWS.items()),
    *(Loss(NN, f"{name}_margin_loss", place, "rows") for name, place in (("multi", 5), ("multilabel", 2))),
)


@functools.cache  # made once, and not in every step
def _recorded(loss: Loss, found: Callable[..., Tensor]) -> Callable[..., Tensor]:
    place = loss.place
    function: Callable[..., Tensor] = original(found)  # another step may be running

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        means = None if torch.compiler.is_dynamo_compiling() else WATCHING.get()
        if means is None or len(args) <= place or args[place] != MEAN or not _is_plain(args[0]):
            return function(*args, **kwargs)
        (values, target), (before, after) = args[:2], (args[:place], args[place + 1 :])
        if loss.over == "targets" and not target.is_floating_point():
            counted, weight = target != args[4], args[2]
            # torch adds up the weights in their own dtype, and counts exactly
            count = counted.sum() if weight is None else (weight[target.masked_fill(~counted, 0)] * counted).sum()
            losses = function(*before, NONE, *after, **kwargs)
            return mean_over(losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32)), count, losses.dtype)
        if not means.elements:
            return function(*args, **kwargs)
        features = 1
        if loss.over != "elements":  # probabilities of classes, or rows
            features = values.shape[1 if loss.over == "targets" and values.dim() > 1 else -1]
        count = values.numel() // max(features, 1)
        return means.note(function(*before, MEAN if count else SUM, *after, **kwargs), count)

    return call


def original(function: Any) -> Any:
    """The function of torch's that a recorded one stands for: tensors with rules of their own are told of that one."""
    return getattr(function, "__wrapped__", function)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has a value that is this step's: no fake one, and none of a transform such as `vmap`."""
    return type(tensor) in (Tensor, nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
