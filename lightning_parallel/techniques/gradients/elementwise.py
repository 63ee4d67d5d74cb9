"""Which optimizers can step shards as they are, and which can step the parameters of one pipeline stage alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

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

BY_PARAMETER: set[type[Optimizer]] = {optim.Adafactor, optim.Muon, optim.SparseAdam}
"""Optimizers beside these that look at all elements of one parameter, but at no other parameter."""


def steps_each_parameter(optimizer: Optimizer) -> bool:
    """Whether the optimizer steps each parameter by itself: a known class, or the user says so by an attribute."""
    said = getattr(optimizer, "steps_each_parameter", False)
    return bool(said) or steps_as_one_of(ELEMENTWISE | BY_PARAMETER, optimizer)


def steps_as_one_of(kinds: Iterable[type[Optimizer]], optimizer: Optimizer) -> bool:
    """Whether the optimizer is one of these kinds, or of a subclass that steps as it does."""
    kind = type(optimizer)
    for known in kinds:
        names = ("step", "_init_group") if "_init_group" in vars(known) else ("step",)
        # torch wraps `step` when it makes the first optimizer of a class
        if issubclass(kind, known) and all(
            inspect.unwrap(getattr(kind, name)) is inspect.unwrap(getattr(known, name)) for name in names
        ):
            return True
    return False
