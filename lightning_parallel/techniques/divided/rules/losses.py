"""Rules of losses from logits of which each rank has some classes, or some positions: no rank gathers the logits.

With logits x of a token and its label y, cross-entropy is log sum exp(x) - x[y]: two numbers for each token, each a sum
over the classes of all ranks (after the maximum is subtracted, so that nothing overflows).
Source: M. Shoeybi et al., Megatron-LM, 2019.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.collectives.conjugate_collectives import entered, total
from lightning_parallel.collectives.elements import Elements
from lightning_parallel.techniques.divided.alignment import align_shardings, as_divided, enter_once
from lightning_parallel.techniques.divided.rules.products import require_numbers
from lightning_parallel.techniques.divided.rules.reductions import cuts_after_reduction
from lightning_parallel.techniques.divided.table import NAMES, LocalCall, by_name, operations, rule
from lightning_parallel.techniques.divided.tensor import Divided, is_divided
from lightning_parallel.techniques.tools.means import mean_over

REDUCTIONS = ("none", "sum", "mean")


@rule(F.cross_entropy, F.nll_loss, named=True)
def _of_labels(func: Any, args: Any, kwargs: Any) -> Any:
    """Losses of logits (`nll_loss`: log-probabilities) of shape [batch, classes, ...] or [classes], and of labels.

    Raises:
        IndexError: a label of cross-entropy is no class.
    """
    named = by_name(func, args, kwargs)
    logits, target, weight, ignored = (named[name] for name in ("input", "target", "weight", "ignore_index"))
    reduction, classes = named["reduction"], 1 if logits.dim() > 1 else 0
    positions = [dim for dim in range(logits.dim()) if dim != classes]
    is_current_form = named["size_average"] is named["reduce"] is None and reduction in REDUCTIONS
    same_shape = not target.is_floating_point() and [logits.shape[dim] for dim in positions] == list(target.shape)
    if not is_current_form or not same_shape or not is_divided(logits) or is_divided(weight):
        return NotImplemented  # no rule for this form, or torch raises for it
    columns, aligned = logits.cuts.get(classes), align_shardings((target, logits), (positions, range(logits.dim())))
    if aligned is None or (columns is not None and not columns.same(aligned[1].get(classes))):
        return NotImplemented
    sharded_positions = {positions.index(dim): elements for dim, elements in aligned[1].items() if dim != classes}
    own, own_target = aligned[0][1].movedim(classes, -1), aligned[0][0]  # [..., classes], [...]
    counted = own_target != ignored
    label = own_target.masked_fill(~counted, 0)
    if func is F.nll_loss:
        at_label = _at(own, *_place(label, columns))
        at_label = at_label if columns is None else total(at_label, columns.ranks)
        weights = counted.to(at_label.dtype) if weight is None else weight[label] * counted
        loss = -at_label * weights
    else:
        size, smoothing = logits.shape[classes], named["label_smoothing"]
        require_numbers(own_target, size, "Target", "classes", counted)
        class_weights = own.new_ones(size, dtype=_exact(own)) if weight is None else weight.to(_exact(own))
        local_weights = class_weights if columns is None else columns.take(class_weights, 0)
        smoothing_weights = local_weights if smoothing else None
        log_sum, at_label, weighted = _Sums.apply(own, label, columns, smoothing_weights, False)[:3]  # type: ignore[no-untyped-call]
        weights = class_weights[label] * counted
        loss = (1 - smoothing) * (log_sum - at_label) * weights
        if smoothing:
            loss = loss + smoothing / size * (log_sum * class_weights.sum() - weighted) * counted
    # Torch's result dtype: under autocast losses stay in single precision.
    dtype = loss.dtype if torch.is_autocast_enabled(own.device.type) else own.dtype
    if reduction == "none":
        return as_divided(loss.to(dtype), sharded_positions)
    loss_sum, count = loss.sum(), weights.sum()
    for elements in sharded_positions.values():
        loss_sum, count = total(loss_sum, elements.ranks), total(count, elements.ranks)
    return loss_sum.to(dtype) if reduction == "sum" else mean_over(loss_sum, count, dtype)


@rule(*operations("logsumexp", "argmax"))
def _along_one(func: Any, args: Any, kwargs: Any) -> Any:
    named = {**dict(zip(("input", "dim", "keepdim"), args, strict=False)), **kwargs}
    divided, dim, keepdim = args[0], named.get("dim"), named.get("keepdim", False)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not is_divided(divided) or not isinstance(dim, int) or "out" in kwargs:
        return NotImplemented
    dim %= divided.dim()
    cuts = cuts_after_reduction(divided, (dim,), keepdim)
    if dim not in divided.cuts:
        return Divided(func(divided.own, dim, keepdim), cuts)
    own, columns = divided.own.movedim(dim, -1), divided.cuts[dim]
    if NAMES[func] == "argmax":
        result = _largest(own.detach(), columns)
    else:
        result = _Sums.apply(own, None, columns, None, True)[0].to(divided.dtype)  # type: ignore[no-untyped-call]
    return as_divided(result.unsqueeze(dim) if keepdim else result, cuts)


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
    log_sum = _Sums.apply(own.movedim(dim, -1), None, columns, None, False)[0].unsqueeze(dim)  # type: ignore[no-untyped-call]
    result = own.to(log_sum.dtype) - enter_once(log_sum, columns.ranks)
    result = result if NAMES[func] == "log_softmax" else result.exp()
    return Divided(result.to(own.dtype), divided.cuts)


@torch.no_grad()
def _largest(own: Tensor, columns: Elements) -> Tensor:
    """Return the index of the largest element along the last dimension, the first of equal ones; nan is the largest."""
    group = columns.ranks.group
    if own.shape[-1]:
        value, position = own.max(-1)
        index = columns.numbers("index", own.device)[position]
    else:
        least = -torch.inf if own.is_floating_point() else torch.iinfo(own.dtype).min
        value, index = own.new_full(own.shape[:-1], least), own.new_full(own.shape[:-1], columns.size).long()
    unknown = value.isnan()
    largest = torch.stack([unknown.to(value.dtype), value.masked_fill(unknown, 0)])  # nan first, as it does not compare
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    winner = torch.where(torch.where(largest[0] > 0, unknown, value == largest[1]), index, columns.size)
    dist.all_reduce(winner, dist.ReduceOp.MIN, group=group)
    return winner.clamp(max=columns.size - 1)


# ---------------------------------------------------------------- sums over the classes of all ranks


class _Sums(Function):
    """Log-sum-exp, the logit at the label, and a weighted sum of logits, over the classes of all ranks.

    The last output, the local probabilities, is used only by backward, so that backward can be differentiated.

    Args:
        own: this rank's logits, [..., classes].
        label: the class of each position, [...]; None leaves out the second output.
        columns: the classes that ranks have; None if each has all.
        weights: of this rank's classes; None leaves out the third output.
        infinite: whether infinite logits give an infinite sum, as in torch's `logsumexp`; else nan, as in its losses.
    """

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, label: Tensor | None, columns: Elements | None, weights: Tensor | None, infinite: bool
    ) -> Any:
        exact = own.to(_exact(own))  # [..., local classes]
        # The largest logit of each position, [...], is subtracted so that nothing overflows.
        largest = exact.amax(-1) if own.shape[-1] else exact.new_full(own.shape[:-1], -torch.inf)
        if columns is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=columns.ranks.group)
        # Where all logits are -inf, the sum is 0, and the result its logarithm.
        largest = largest.masked_fill(largest.isinf() if infinite else largest == -torch.inf, 0)
        exponentials = (exact - largest[..., None]).exp_()
        place, here = (None, None) if label is None else _place(label, columns)
        at_label = None if place is None or here is None else _at(exact, place, here)
        weighted = exact @ weights if weights is not None else None
        # All sums over ranks in one message, [1 to 3, ...].
        message = torch.stack([each for each in (exponentials.sum(-1), at_label, weighted) if each is not None])
        if columns is not None:
            dist.all_reduce(message, group=columns.ranks.group)
        sums = list(message.unbind())
        total_sum = sums.pop(0)
        probabilities = exponentials.div_(total_sum[..., None])  # of the local classes, among all classes
        ctx.save_for_backward(probabilities, place, here, weights)
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.columns = own.dtype, columns
        at_label = sums.pop(0) if at_label is not None else None
        return total_sum.log() + largest, at_label, sums.pop(0) if weighted is not None else None, probabilities

    @staticmethod
    def backward(
        ctx: Any, of_whole: Tensor | None, of_label: Tensor | None, of_weighted: Tensor | None, of_each: Tensor | None
    ) -> Any:
        probabilities, place, here, weights = ctx.saved_tensors
        columns = ctx.columns
        gradients = [] if of_whole is None else [probabilities * _for_own(of_whole, columns)[..., None]]
        if of_each is not None:  # through the softmax: p * (g - sum of p g over the classes of all ranks)
            inner = (probabilities * of_each).sum(-1)
            inner = inner if columns is None else _for_own(total(inner, columns.ranks), columns)
            gradients.append(probabilities * (of_each - inner[..., None]))
        gradient = sum(gradients[1:], gradients[0]) if gradients else torch.zeros_like(probabilities)
        if place is not None and of_label is not None:
            grad = (_for_own(of_label, columns) * here)[..., None]
            # A rank without classes needs an autograd history, too, for ranks with classes wait for it in backward.
            gradient = gradient.scatter_add_(-1, place[..., None], grad) if gradient.shape[-1] else gradient + grad
        if weights is not None and of_weighted is not None:
            gradient += _for_own(of_weighted, columns)[..., None] * weights
        return gradient.to(ctx.dtype), None, None, None, None


def _for_own(of_sum: Tensor, columns: Elements | None) -> Tensor:
    """Return the gradient of a sum over the classes of all ranks, for use on this rank's classes."""
    return of_sum if columns is None or not torch.is_grad_enabled() else entered(of_sum, columns.ranks)


def _place(label: Tensor, columns: Elements | None) -> tuple[Tensor, Tensor]:
    """Return the position of the label's class among the local classes, and whether it is one of them."""
    if columns is None:
        return label, torch.ones_like(label, dtype=torch.bool)
    index = columns.numbers("index", label.device)
    place = torch.searchsorted(index, label).clamp(max=max(columns.length - 1, 0))
    here = index[place] == label if columns.length else torch.zeros_like(label, dtype=torch.bool)
    return place, here


def _at(x: Tensor, place: Tensor, here: Tensor) -> Tensor:
    if not x.shape[-1]:
        return x.sum(-1)  # zeros with an autograd history, as all ranks must take part in backward
    return x.gather(-1, place[..., None]).squeeze(-1).masked_fill(~here, 0)


def _exact(own: Tensor) -> torch.dtype:
    return torch.promote_types(own.dtype, torch.float32)
