"""Losses computed element by element (squares, distances, divergences), and from logarithms of probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_parallel.collectives.by_elements import total
from lightning_parallel.techniques.divided.meeting import as_divided, in_step
from lightning_parallel.techniques.divided.rules.losses import at_labels, reduced, with_labels
from lightning_parallel.techniques.divided.table import rule
from lightning_parallel.techniques.tools.means import LOSSES, MEAN, NONE, SUM, mean_over_elements

# What torch.nn.functional calls, by its place for the reduction; while a step runs, torch's names lead elsewhere.
PLACES = {getattr(loss.owner, loss.name): loss.place for loss in LOSSES if loss.over == "elements"}
REDUCTIONS = {NONE: "none", MEAN: "mean", SUM: "sum"}


@rule(*PLACES)
def _one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    place = PLACES[func]
    if len(args) <= place or any(isinstance(each, Tensor) for each in kwargs.values()):
        return NotImplemented
    mine = in_step(args, max(each.dim() for each in args if isinstance(each, Tensor)))
    if mine is None:
        return NotImplemented
    own, cuts = mine
    own[place] = NONE
    losses = as_divided(func(*own, **kwargs), cuts)
    if args[place] == NONE:
        return losses
    if args[place] == SUM:
        return losses.sum()
    return mean_over_elements(losses.mean(), losses.numel())


@rule(torch._C._nn.nll_loss_nd)
def _of_labels(func: Any, args: Any, kwargs: Any) -> Any:
    """From logarithms of probabilities, (batch, classes, ...) or (classes)."""
    logs, target, weight, reduction, ignored = args
    if (found := with_labels(logs, target, weight)) is None:
        return NotImplemented
    own, own_target, columns, over = found
    counted = own_target != ignored
    label = own_target.masked_fill(~counted, 0)
    at_label = at_labels(own, label, columns)
    at_label = at_label if columns is None else total(at_label, columns.ranks)
    weights = counted.to(at_label.dtype) if weight is None else weight[label] * counted
    return reduced(-at_label * weights, weights, over, REDUCTIONS[reduction], logs.own)
