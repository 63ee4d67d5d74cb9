"""Which optimizers can step shards as they are: those that treat every element alike."""

from __future__ import annotations

import inspect

from torch import optim
from torch.optim import Optimizer

ELEMENTWISE: set[type[Optimizer]] = {
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
}
"""Optimizers in which no element of a parameter looks at another one; add your own to have it step shards."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the optimizer is one of `ELEMENTWISE`, or of a subclass that steps as it does."""
    return any(isinstance(optimizer, known) and _steps_as(type(optimizer), known) for known in ELEMENTWISE)


def _steps_as(kind: type[Optimizer], known: type[Optimizer]) -> bool:
    names = ("step", "_init_group") if "_init_group" in vars(known) else ("step",)
    # torch wraps `step` when it makes the first optimizer of a class
    return all(inspect.unwrap(getattr(kind, name)) is inspect.unwrap(getattr(known, name)) for name in names)
