"""Recording of the mean losses of a step and their counts, from which the mean over the full batch is computed.

If ranks or microbatches r share a batch, a loss over all of it is

    mean = sum_r count_r mean_r / sum_r count_r

So the gradient of each mean is multiplied where the mean was computed, by a `Scale` that is filled in when all counts
are known. Any sum of means then has the gradient of the full batch, even if each of them counts something else.

The inputs of torch's loss functions determine the count; `mean` computes means by hand. The loss functions are replaced
during a step, in the modules where `torch.nn.functional` finds them: a `TorchFunctionMode` makes every other operation
twice as expensive for the host.
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
"""Numbers of the values of `reduction` in the loss functions of torch's C++ API."""


@dataclass(eq=False)
class Scale:
    """Factor by which a gradient is multiplied; `factor` is None as long as it is not known."""

    factor: Tensor | None = None


class _Scaled(Function):
    """Identity whose gradient is multiplied by a scale, which is read in backward only."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, scale: Scale) -> Tensor:
        ctx.scale = scale
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        gradient, factor = incoming[0], ctx.scale.factor
        return gradient if factor is None else gradient * factor.to(gradient.dtype), None


def scaled(value: Tensor, scale: Scale) -> Tensor:
    """Return a copy of the value whose gradient is multiplied by a scale, which may be filled in until backward."""
    result: Tensor = _Scaled.apply(value, scale)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True, eq=False)
class Mean:
    """Mean that a step computed."""

    count: Tensor  # number of targets, elements or rows over which it averages; float64
    value: Tensor  # the mean
    given: Tensor  # the tensor that the step got: equal to `value`, unless changed in place since
    edge: GradientEdge | None  # the edge of `given` in the autograd graph; None without gradients
    scale: Scale  # of its gradient
    total: Scale  # scale of a gradient that is a sum over targets: makes it the mean over the targets of all ranks


class Means:
    """Context manager: record the means of one step, or of one microbatch, that are computed inside."""

    def __init__(self, elements: bool = True) -> None:
        self.elements = elements  # whether to record means over elements and rows, beside those over targets
        self.all: list[Mean] = []
        self._in_loss: list[Mean] | None = None  # the means on which the returned loss depends
        self._freed: list[tuple[Tensor, dict[Mean, Tensor]]] = []  # losses that went backward, their contributions
        self._entered: list[tuple[list[Any], Token[Means | None]]] = []

    def __enter__(self) -> Self:
        functions = [vars(loss.owner)[loss.name] for loss in LOSSES]
        for loss, function in zip(LOSSES, functions, strict=True):
            setattr(loss.owner, loss.name, _recorded(loss, function))
        self._entered.append((functions, WATCHING.set(self)))
        return self

    def __exit__(self, *_: object) -> None:
        functions, before = self._entered.pop()
        WATCHING.reset(before)
        for loss, function in zip(LOSSES, functions, strict=True):
            setattr(loss.owner, loss.name, function)

    def note(self, mean: Tensor, count: Tensor | float, total: Scale | None = None) -> Tensor:
        """Record a mean and its count; return the tensor that the step must use. `total`: see `Mean.total`."""
        scale, count = Scale(), torch.as_tensor(count, dtype=torch.float64, device=mean.device).detach()
        result = scaled(mean, total or scale) if mean.requires_grad else mean.clone()
        edge = get_gradient_edge(result) if result.requires_grad else None
        self.all.append(Mean(count, mean.detach(), result, edge, scale, total or Scale()))
        return result

    def returned(self, loss: Tensor | None) -> None:
        """Note the loss that the step returned: `count` is then that of the means on which the loss depends."""
        if loss is not None and loss.requires_grad:
            self._in_loss = [*self._derivatives(loss)]

    def before_backward(self, loss: Tensor) -> None:
        """Store `parts_of` a loss before its graph is freed by backward: it may be logged later."""
        self._freed.append((loss.detach(), self.parts_of(loss)))

    @property
    def count(self) -> Tensor | None:
        """The total count of the means in the loss of the step (of all means without such a loss); None if none."""
        counts = [mean.count for mean in (self.all if self._in_loss is None else self._in_loss)]
        return torch.stack(counts).sum() if counts else None

    def parts_of(self, value: Tensor) -> dict[Mean, Tensor]:
        """Return what each mean contributes to `value`: {a: 2 * a, b: 0.5 * b} for `2 * a + 0.5 * b + rest`."""
        for loss, parts in self._freed:
            if is_among(value, [loss]):
                return parts
        matching = [mean for mean in self.all if is_among(value, [mean.given])]
        if matching and not matching[0].given._version:
            return {matching[0]: matching[0].value}
        if not value.requires_grad or value.dim():
            return {mean: value.detach() for mean in matching}
        factors = self._derivatives(value)
        return {mean: factor.detach() * mean.value for mean, factor in factors.items() if not factor.requires_grad}

    def _derivatives(self, value: Tensor) -> dict[Mean, Tensor]:
        """Return the derivatives of a value by its means. A derivative that needs no gradient is a constant factor."""
        edges = {mean: mean.edge for mean in self.all if mean.edge is not None}
        if not edges:
            return {}
        try:
            with torch.enable_grad(), torch._C.DisableTorchFunction():
                derivatives = torch.autograd.grad(value, [*edges.values()], create_graph=True, allow_unused=True)
        except RuntimeError as error:
            raise ValueError(
                "the number of targets of this value is unknown, as a backward pass freed its graph; log it before "
                "that, or log the loss itself after self.manual_backward(loss), not after loss.backward()"
            ) from error
        return {mean: derivative for mean, derivative in zip(edges, derivatives, strict=True) if derivative is not None}


def is_among(value: Tensor, means: Sequence[Tensor]) -> bool:
    """Return whether a value is one of the means, perhaps detached: whether it has the same memory."""
    return any(value.data_ptr() == mean.data_ptr() for mean in means)


WATCHING: ContextVar[Means | None] = ContextVar("means", default=None)
"""Recorder of the step that runs in this thread; losses that other threads compute are not recorded."""


@contextmanager
def no_recording() -> Iterator[None]:
    """Context manager: record no means inside, as in modules that compute on samples of all ranks or absent tensors."""
    before = WATCHING.set(None)
    try:
        yield
    finally:
        WATCHING.reset(before)


def mean(total: Tensor, count: Tensor | float) -> Tensor:
    """Divide a total by a count, so that ranks and microbatches together yield the mean over the full batch.

    Torch's loss functions, such as `F.cross_entropy(..., ignore_index=0)`, count their targets without this function.
    A mean that a step computes by hand is weighted by samples, as under DDP, unless it is computed by this function:

        loss = lp.mean((losses * mask).sum(), mask.sum())

    If the total is made of torch's losses, only `count` counts, not their targets. Outside of a step this is
    `total / count`. The count needs no `clamp(min=1)`: where a part of the batch has a count of 0, its mean is 0.

    Args:
        total: the sum over all counted elements; one number.
        count: the number of counted elements. No gradient flows through it.
    """
    if total.dim():
        raise ValueError(f"lp.mean needs a total of one number, not of shape {tuple(total.shape)}; sum it up first")
    means = None if torch.compiler.is_dynamo_compiling() else WATCHING.get()
    if means is None or not _is_plain(total):
        return total / count
    if total.requires_grad:  # means in the total, such as one for each sample, are replaced by the one of `count`
        parts = means._derivatives(total)
        means.all = [recorded for recorded in means.all if recorded not in parts]
    total = total if total.is_floating_point() else total.to(torch.get_default_dtype())
    return mean_over(total, torch.as_tensor(count, device=total.device).detach(), total.dtype)


def mean_over(total: Tensor, count: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a sum divided by a count, recorded as a mean; 0 if the count is 0."""
    means = WATCHING.get()
    if means is None:
        return (total / count).to(dtype)
    return means.note((total / count.masked_fill(count == 0, 1).to(total.dtype)).to(dtype), count)


class Loss(NamedTuple):
    """Loss function of torch."""

    owner: Any  # the module in which `torch.nn.functional` finds it
    name: str
    place: int  # of the argument `reduction`
    over: str  # the mean is over "targets", "elements" or "rows"


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


@functools.cache  # made once, not in every step
def _recorded(loss: Loss, found: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a loss function so that it records its means."""
    place = loss.place
    function: Callable[..., Tensor] = original(found)  # `found` is wrapped already if another step is running

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        means = None if torch.compiler.is_dynamo_compiling() else WATCHING.get()
        if means is None or len(args) <= place or args[place] != MEAN or not _is_plain(args[0]):
            return function(*args, **kwargs)
        (values, target), (before, after) = args[:2], (args[:place], args[place + 1 :])
        if loss.over == "targets" and not target.is_floating_point():
            counted, weight = target != args[4], args[2]
            # like torch: class weights are summed in their dtype, an unweighted count is exact
            count = counted.sum() if weight is None else (weight[target.masked_fill(~counted, 0)] * counted).sum()
            losses = function(*before, NONE, *after, **kwargs)
            return mean_over(losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32)), count, losses.dtype)
        if not means.elements:
            return function(*args, **kwargs)
        features = 1
        if loss.over != "elements":  # targets are probabilities of classes, or the mean is over rows
            features = values.shape[1 if loss.over == "targets" and values.dim() > 1 else -1]
        count = values.numel() // max(features, 1)
        return means.note(function(*before, MEAN if count else SUM, *after, **kwargs), count)

    return call


def original(function: Any) -> Any:
    """Return torch's function behind a recorded one; `__torch_function__` of tensor subclasses needs that one."""
    return getattr(function, "__wrapped__", function)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has a value of this step: whether it is neither fake nor under a transform as `vmap`."""
    return type(tensor) in (Tensor, nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
