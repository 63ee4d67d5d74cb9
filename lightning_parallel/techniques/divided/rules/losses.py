"""Losses from logits of which each rank has some classes, or some positions: the whole logits never exist.

With x the logits of a token and y its label, cross-entropy is log sum exp(x) - x[y]: two numbers a token, each a sum
over the ranks' classes (after the maximum, taken out so that nothing overflows).
Source: M. Shoeybi et al., Megatron-LM, 2019.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.collectives.by_elements import entered, total
from lightning_parallel.collectives.elements import Elements
from lightning_parallel.techniques.divided.meeting import as_divided, brought_together, met
from lightning_parallel.techniques.divided.rules.products import require_numbers
from lightning_parallel.techniques.divided.rules.reductions import left_of
from lightning_parallel.techniques.divided.table import NAMES, LocalCall, by_name, operations, rule
from lightning_parallel.techniques.divided.tensor import Divided, is_divided
from lightning_parallel.techniques.tools.means import mean_over

REDUCTIONS = ("none", "sum", "mean")


@rule(F.cross_entropy, F.nll_loss, named=True)
def _of_labels(func: Any, args: Any, kwargs: Any) -> Any:
    """From logits, or for `nll_loss` logarithms of probabilities, (batch, classes, ...) or (classes).

    Raises:
        IndexError: a label of cross-entropy that is no class.
    """
    given = by_name(func, args, kwargs)
    logits, target, weight, ignored = (given[name] for name in ("input", "target", "weight", "ignore_index"))
    reduction, classes = given["reduction"], 1 if logits.dim() > 1 else 0
    positions = [dim for dim in range(logits.dim()) if dim != classes]
    as_now = given["size_average"] is given["reduce"] is None and reduction in REDUCTIONS
    alike = not target.is_floating_point() and [logits.shape[dim] for dim in positions] == list(target.shape)
    if not as_now or not alike or not is_divided(logits) or is_divided(weight):
        return NotImplemented  # there is no rule, or torch says what is wrong
    columns, mine = logits.cuts.get(classes), brought_together((target, logits), (positions, range(logits.dim())))
    if mine is None or (columns is not None and not columns.same(mine[1].get(classes))):
        return NotImplemented
    over = {positions.index(dim): elements for dim, elements in mine[1].items() if dim != classes}
    own, own_target = mine[0][1].movedim(classes, -1), mine[0][0]  # (..., classes), (...)
    counted = own_target != ignored
    label = own_target.masked_fill(~counted, 0)
    if func is F.nll_loss:
        at_label = _at(own, *_place(label, columns))
        at_label = at_label if columns is None else total(at_label, columns.ranks)
        weights = counted.to(at_label.dtype) if weight is None else weight[label] * counted
        loss = -at_label * weights
    else:
        size, smoothing = logits.shape[classes], given["label_smoothing"]
        require_numbers(own_target, size, "Target", "classes", counted)
        shares = own.new_ones(size, dtype=_exact(own)) if weight is None else weight.to(_exact(own))
        own_shares = shares if columns is None else columns.take(shares, 0)
        weighing = own_shares if smoothing else None
        whole, at_label, weighted = _Sums.apply(own, label, columns, weighing, False)[:3]  # type: ignore[no-untyped-call]
        weights = shares[label] * counted
        loss = (1 - smoothing) * (whole - at_label) * weights
        if smoothing:
            loss = loss + smoothing / size * (whole * shares.sum() - weighted) * counted
    # In the dtype that torch gives it: autocast leaves losses in single precision.
    dtype = loss.dtype if torch.is_autocast_enabled(own.device.type) else own.dtype
    if reduction == "none":
        return as_divided(loss.to(dtype), over)
    summed, count = loss.sum(), weights.sum()
    for elements in over.values():
        summed, count = total(summed, elements.ranks), total(count, elements.ranks)
    return summed.to(dtype) if reduction == "sum" else mean_over(summed, count, dtype)


@rule(*operations("logsumexp", "argmax"))
def _along_one(func: Any, args: Any, kwargs: Any) -> Any:
    given = {**dict(zip(("input", "dim", "keepdim"), args, strict=False)), **kwargs}
    divided, dim, keepdim = args[0], given.get("dim"), given.get("keepdim", False)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not is_divided(divided) or not isinstance(dim, int) or "out" in kwargs:
        return NotImplemented
    dim %= divided.dim()
    cuts = left_of(divided, (dim,), keepdim)
    if dim not in divided.cuts:
        return Divided(func(divided.own, dim, keepdim), cuts)
    own, columns = divided.own.movedim(dim, -1), divided.cuts[dim]
    if NAMES[func] == "argmax":
        made = _largest(own.detach(), columns)
    else:
        made = _Sums.apply(own, None, columns, None, True)[0].to(divided.dtype)  # type: ignore[no-untyped-call]
    return as_divided(made.unsqueeze(dim) if keepdim else made, cuts)


@rule(*operations("log_softmax", "softmax"), remembered=True)
def _normalised(func: Any, args: Any, kwargs: Any) -> Any:
    divided, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    dtype = next((each for each in (*args[2:], *kwargs.values()) if isinstance(each, torch.dtype)), None)
    if not is_divided(divided) or not isinstance(dim, int):
        return NotImplemented
    dim %= divided.dim()
    if dim not in divided.cuts:
        return LocalCall(func, divided.cuts)
    columns = divided.cuts[dim]
    own = divided.own if dtype is None else divided.own.to(dtype)
    whole = _Sums.apply(own.movedim(dim, -1), None, columns, None, False)[0].unsqueeze(dim)  # type: ignore[no-untyped-call]
    made = own.to(whole.dtype) - met(whole, columns.ranks)
    made = made if NAMES[func] == "log_softmax" else made.exp()
    return Divided(made.to(own.dtype), divided.cuts)


@torch.no_grad()
def _largest(own: Tensor, columns: Elements) -> Tensor:
    """The index of the largest element in the last dimension of the whole, the first of equal ones; nan is largest."""
    group = columns.ranks.group
    if own.shape[-1]:
        value, place = own.max(-1)
        index = columns.index(own.device)[place]
    else:
        least = -torch.inf if own.is_floating_point() else torch.iinfo(own.dtype).min
        value, index = own.new_full(own.shape[:-1], least), own.new_full(own.shape[:-1], columns.size).long()
    unknown = value.isnan()
    found = torch.stack([unknown.to(value.dtype), value.masked_fill(unknown, 0)])  # what is larger than nan, none tells
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    winner = torch.where(torch.where(found[0] > 0, unknown, value == found[1]), index, columns.size)
    dist.all_reduce(winner, dist.ReduceOp.MIN, group=group)
    return winner.clamp(max=columns.size - 1)


# ---------------------------------------------------------------- sums over the classes of all ranks


class _Sums(Function):
    """Log-sum-exp, the logit at the label, and a weighted sum of logits, over the classes of all ranks.

    The last result, probabilities, is there for backward alone, which is differentiated by it.

    Args:
        own: this rank's logits, (..., classes).
        label: the class of each position, (...); None leaves out the second result.
        columns: the classes that ranks have; None where each has all.
        weights: of this rank's classes; None leaves out the third result.
        infinite: whether the sum may be infinite, as torch's `logsumexp`; its softmax and losses are nan there.
    """

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, label: Tensor | None, columns: Elements | None, weights: Tensor | None, infinite: bool
    ) -> Any:
        exact = own.to(_exact(own))  # (..., own classes)
        # The largest logit of each position, (...), is taken out so that nothing overflows.
        largest = exact.amax(-1) if own.shape[-1] else exact.new_full(own.shape[:-1], -torch.inf)
        if columns is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=columns.ranks.group)
        # What is all -inf has the sum 0, and its logarithm.
        largest = largest.masked_fill(largest.isinf() if infinite else largest == -torch.inf, 0)
        exponentials = (exact - largest[..., None]).exp_()
        place, here = (None, None) if label is None else _place(label, columns)
        at_label = None if place is None or here is None else _at(exact, place, here)
        weighted = exact @ weights if weights is not None else None
        # All that ranks sum in one message, (1 to 3, ...).
        message = torch.stack([each for each in (exponentials.sum(-1), at_label, weighted) if each is not None])
        if columns is not None:
            dist.all_reduce(message, group=columns.ranks.group)
        sums = list(message.unbind())
        whole = sums.pop(0)
        probabilities = exponentials.div_(whole[..., None])  # of own classes among all
        ctx.save_for_backward(probabilities, place, here, weights)
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.columns = own.dtype, columns
        at_label = sums.pop(0) if at_label is not None else None
        return whole.log() + largest, at_label, sums.pop(0) if weighted is not None else None, probabilities

    @staticmethod
    def backward(
        ctx: Any, of_whole: Tensor | None, of_label: Tensor | None, of_weighted: Tensor | None, of_each: Tensor | None
    ) -> Any:
        probabilities, place, here, weights = ctx.saved_tensors
        columns = ctx.columns
        found = [] if of_whole is None else [probabilities * _for_own(of_whole, columns)[..., None]]
        if of_each is not None:  # through the softmax: p * (g - sum of p g over the classes of all ranks)
            inner = (probabilities * of_each).sum(-1)
            inner = inner if columns is None else _for_own(total(inner, columns.ranks), columns)
            found.append(probabilities * (of_each - inner[..., None]))
        gradient = sum(found[1:], found[0]) if found else torch.zeros_like(probabilities)
        if place is not None and of_label is not None:
            mine = (_for_own(of_label, columns) * here)[..., None]
            # Without classes too there is a history, for ranks that have some wait for it.
            gradient = gradient.scatter_add_(-1, place[..., None], mine) if gradient.shape[-1] else gradient + mine
        if weights is not None and of_weighted is not None:
            gradient += _for_own(of_weighted, columns)[..., None] * weights
        return gradient.to(ctx.dtype), None, None, None, None


def _for_own(of_sum: Tensor, columns: Elements | None) -> Tensor:
    """The gradient of a sum over the classes of all ranks, as each computes with it those of its own classes."""
    return of_sum if columns is None or not torch.is_grad_enabled() else entered(of_sum, columns.ranks)


def _place(label: Tensor, columns: Elements | None) -> tuple[Tensor, Tensor]:
    """Where the label's class is among this rank's, and whether it is there at all."""
    if columns is None:
        return label, torch.ones_like(label, dtype=torch.bool)
    index = columns.index(label.device)
    place = torch.searchsorted(index, label).clamp(max=max(columns.length - 1, 0))
    here = index[place] == label if columns.length else torch.zeros_like(label, dtype=torch.bool)
    return place, here


def _at(x: Tensor, place: Tensor, here: Tensor) -> Tensor:
    if not x.shape[-1]:
        return x.sum(-1)  # zeros that have a history, for backward must come by on all ranks
    return x.gather(-1, place[..., None]).squeeze(-1).masked_fill(~here, 0)


def _exact(own: Tensor) -> torch.dtype:
    return torch.promote_types(own.dtype, torch.float32)
