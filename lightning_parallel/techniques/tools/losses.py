"""The means that a step computes, seen where it computes them: torch's own loss functions, and sums divided by hand.

A loss function is given its inputs, which tell over how much it averages. A quotient is a mean where it divides a sum
over elements, as `(losses * mask).sum() / mask.sum()`, whose count is what it is divided by: over all that share a
batch, the mean is the sum of the numerators over that of the divisors.

Functions of torch are replaced for the time of a step: a `TorchFunctionMode` would see the same and make every other
operation twice as expensive for the host. Methods of tensors are replaced for a whole run, and do nothing outside of
steps: to change a class costs every use of it anew, 70 us in each step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_parallel.techniques.tools.reach import elements_of, has_any_of, is_of_selection
from lightning_parallel.techniques.tools.redirect import without_listeners

if TYPE_CHECKING:
    from lightning_parallel.techniques.tools.means import Means

NONE, MEAN, SUM = 0, 1, 2
"""The reductions as torch numbers them."""

WATCHING: ContextVar[Means | None] = ContextVar("means", default=None)
"""What notes the means of the step that runs in this thread; losses of other threads are no concern of it."""


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, means are none of the step's: they are of all ranks already, or parts of what is noted itself."""
    before = WATCHING.set(None)
    try:
        yield
    finally:
        WATCHING.reset(before)


def mean_over(losses: Tensor, count: Tensor, dtype: torch.dtype, of: Tensor | None = None) -> Tensor:
    """The sum of losses over a count, noted as a mean; over nothing at all it is 0, not 0 / 0."""
    total = losses.sum(dtype=torch.float64 if losses.dtype == torch.float64 else torch.float32)
    means = WATCHING.get()
    if means is None:
        return (total / count).to(dtype)
    divisor = torch.where(count == 0, torch.ones_like(count), count).to(total.dtype)
    with unwatched():
        mean = (total / divisor).to(dtype)
    return means.note(mean, count, of)


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
    count = args[0].numel() // max(features, 1)
    if not means.elements:
        return mean_of(args[0], count, partial(function, *args))
    mean = function(*args[:place], MEAN if count else SUM, *args[place + 1 :])
    return mean_over_elements(mean, count, of=args[1])


def _of_rows(means: Means, function: Callable[..., Tensor], args: tuple[Any, ...], place: int) -> Tensor:
    return _of_elements(means, function, args, place, features=args[0].shape[-1])


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

    def watched(self, means: Means, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Any) -> Tensor:
        """What the loss function returns to a step whose means are noted."""
        if len(args) <= self.place or args[self.place] != MEAN or not _is_plain(args[0]):
            return function(*args, **kwargs)
        return self.kind(means, partial(function, **kwargs), args, self.place)


NN: Any = torch._C._nn
OF_ELEMENTS = {"binary_cross_entropy_with_logits": 4, "kl_div": 2, "poisson_nll_loss": 5, "hinge_embedding_loss": 3,
               "margin_ranking_loss": 4}  # fmt: skip
OF_ROWS = {"cosine_embedding_loss": 4, "triplet_margin_loss": 7}
LOSSES = (
    Loss(NN, "cross_entropy_loss", 3, _of_targets),
    Loss(NN, "nll_loss_nd", 3, _of_targets),
    *(Loss(NN, f"{name}_loss", 2, _of_elements) for name in ("mse", "l1", "smooth_l1", "huber", "soft_margin")),
    Loss(NN, "binary_cross_entropy", 3, _of_elements),
    *(Loss(torch, name, place, _of_elements) for name, place in OF_ELEMENTS.items()),
    *(Loss(torch, name, place, _of_rows) for name, place in OF_ROWS.items()),
    *(Loss(NN, f"{name}_margin_loss", place, _of_rows) for name, place in (("multi", 5), ("multilabel", 2))),
)
NOTED_LOSSES = frozenset(loss.name.removesuffix("_nd").replace("entropy_loss", "entropy") for loss in LOSSES)
"""Their names in `torch.nn.functional`."""


# -------------------------------------------------------------------- means by hand


def _divided(means: Means, function: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    if kwargs or len(args) != 2 or not _is_number(args[0]):
        return function(*args, **kwargs)
    total, divisor = args
    if not (each := _counts(means, total, divisor)):
        with unwatched():  # where operations are watched, too, this one comes here again
            result = function(total, divisor)
        if _is_number(divisor) and not result.requires_grad:
            means.quotients.append((result, total, divisor))
        return result
    if (floored := means.floor_of(divisor)) is not None:
        with unwatched():
            mean = function(total, divisor)
        count, over = floored[0].to(mean.device) * each, divisor.to(mean.device) * each
        return means.note(mean, count, None, True, over, floored[1] * each)
    tensor, kind = isinstance(divisor, Tensor), None if isinstance(divisor, Tensor) else torch.float64
    count, some = torch.as_tensor(divisor, dtype=kind, device=total.device), total.detach() != 0
    nothing = count == 0
    with unwatched():  # where there is nothing here, and something in other parts, 0 / 0 is 0
        mean = function(total, torch.where(nothing, torch.ones_like(count), count) if tensor else divisor)
    over = torch.where(nothing, some, count.double()) * each
    # a floor that was not seen makes 0 / 1 of nothing
    return means.note(mean, count.double().masked_fill(~some & (count <= 1), 0) * each, None, True, over)


def _counts(means: Means, total: Tensor, divisor: Any) -> int:
    """How many times as much as it is divided by a quotient is a mean over: once where a sum over elements is divided.

    Where their mean is divided, by the mean of a mask, it is as many times as there are elements. Any other is none.
    Without a graph a total may be anything, so it is left alone. A number of Python's may be any constant: it is left
    alone where all means count together, as in a pipeline.
    """
    if isinstance(divisor, Tensor):
        known = _is_number(divisor) and not divisor.requires_grad and not divisor.is_complex()
    else:
        known = means.elements and isinstance(divisor, int | float) and divisor > 0
    elements = elements_of(total.grad_fn, means.edges) if known and total.requires_grad else 0
    return elements if isinstance(divisor, Tensor) or elements == 1 else 0


def mean_of(values: Tensor, count: int, average: Callable[[], Tensor]) -> Tensor:
    """An average of values over so many, noted where they were selected from others, as many as there were."""
    means = None if torch.compiler.is_dynamo_compiling() else WATCHING.get()
    if means is None:
        return average()
    with unwatched():
        mean = average()
    if not is_of_selection(values.grad_fn) or has_any_of(values.grad_fn, means.edges):
        return mean
    mean = mean if count else mean.nan_to_num(0.0)
    return means.note(mean, torch.full((), count, dtype=torch.float64, device=mean.device), by_hand=True)


def _averaged(means: Means, function: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    values = args[0]
    if kwargs or len(args) != 1 or type(values) is not Tensor or not is_of_selection(values.grad_fn):
        mean = function(*args, **kwargs)
        if not mean.requires_grad and len(args) == 1 and _is_number(mean):
            with without_listeners():  # to which a number that is read is the step's
                means.averages.append((mean, values.numel()))
        return mean
    return mean_of(values, values.numel(), partial(function, values)) if _is_plain(values) else function(values)


def _averaged_numbers(means: Means, function: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    values = args[0]
    if kwargs or len(args) != 1 or has_any_of(values.grad_fn, means.edges):
        return function(*args, **kwargs)
    with unwatched():
        numbers, total = values.isnan().logical_not().sum(), values.nansum()
        mean = total / numbers.clamp(min=1)
    return means.note(mean, numbers, by_hand=True) if _is_number(total) and _is_number(numbers) else mean


def _floored(means: Means, function: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    result = function(*args, **kwargs)
    given = (*args[1:], *kwargs.values()) if kwargs.keys() <= {"min"} else ()
    if len(given) == 1 and _is_number(args[0]) and isinstance(given[0], int | float) and given[0] > 0:
        means.floored(args[0], result, given[0])
    return result


class ByHand(NamedTuple):
    """An operation of which means are made: where it is found, and what it returns to a step whose means are noted."""

    owner: Any
    name: str
    watched: Callable[[Means, Callable[..., Tensor], Any, Any], Tensor]


DIVISIONS = ("div", "divide", "true_divide")
FLOORS = ("clamp", "clamp_min", "clip")
BY_HAND = (
    *(ByHand(Tensor, name, _divided) for name in ("__truediv__", "__itruediv__")),
    *(ByHand(owner, name, _divided) for name in DIVISIONS for owner in (Tensor, torch)),
    ByHand(Tensor, "mean", _averaged),  # and not torch.mean: Lightning knows it as the name of a reduction
    *(ByHand(owner, "nanmean", _averaged_numbers) for owner in (Tensor, torch)),
    *(ByHand(owner, name, _floored) for name in FLOORS for owner in (Tensor, torch)),
)


EACH: tuple[Loss | ByHand, ...] = (*LOSSES, *BY_HAND)
OF_MODULES = {module: {each.name: each for each in EACH if each.owner is module} for module in (NN, torch)}
MODULES = [(module, tuple(watches), tuple(watches.values())) for module, watches in OF_MODULES.items()]
METHODS = {each.name: each for each in BY_HAND if each.owner is Tensor}

Watched = tuple[list[Mapping[str, Any]], Token[Any]]
"""What was there before, and what noted means."""


# -------------------------------------------------------------------- watching


def watch(means: Means) -> Watched:
    """Asks what notes means, from now on, in all that may compute one in this thread; `unwatch` ends it."""
    watch_methods()
    own: list[Mapping[str, Any]] = []
    for module, names, watches in MODULES:
        table = vars(module)
        functions = itemgetter(*names)(table)
        own.append(dict(zip(names, functions, strict=True)))
        table.update(_all_watched(names, watches, functions))
    return own, WATCHING.set(means)


def unwatch(watched: Watched) -> None:
    """Puts back what `watch` replaced."""
    own, before = watched
    WATCHING.reset(before)
    for (module, *_), there in zip(MODULES, own, strict=True):
        vars(module).update(there)


def watch_methods() -> None:
    """Replaces the methods of tensors, if they are not replaced yet."""
    if not _is_watched("mean"):
        for name, method in METHODS.items():
            setattr(Tensor, name, _watched(method, getattr(Tensor, name)))


def unwatch_methods() -> None:
    """Puts back what `watch_methods` replaced, and nobody else since."""
    for name in filter(_is_watched, METHODS):
        before, inherited = original(getattr(Tensor, name)), getattr(Tensor.__base__, name, None)
        if before is inherited:
            delattr(Tensor, name)
        else:
            setattr(Tensor, name, before)


def _is_watched(name: str) -> bool:
    return getattr(getattr(Tensor, name), "watch", None) is METHODS[name]


@functools.cache
def _all_watched(names: Sequence[str], watches: Sequence[Loss | ByHand], functions: Sequence[Any]) -> dict[str, Any]:
    return {name: _watched(*each) for name, *each in zip(names, watches, functions, strict=True)}


@functools.cache  # made once, and not in every step
def _watched(watch: Loss | ByHand, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        means = None if torch.compiler.is_dynamo_compiling() else WATCHING.get()
        return function(*args, **kwargs) if means is None else watch.watched(means, function, args, kwargs)

    vars(call)["watch"] = watch
    return call


def original(function: Any) -> Any:
    """The function of torch's that a watched one stands for: tensors with rules of their own are told of that one."""
    return getattr(function, "__wrapped__", function)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has a value that is this step's: no fake one, and none of a transform such as `vmap`."""
    return type(tensor) in (Tensor, nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dim() and _is_plain(value)
