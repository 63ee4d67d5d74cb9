"""Optimizers that can step local shards, and optimizers that can step the parameters of one pipeline stage alone."""

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
"""Optimizers that update each element independently of all others; add your own class to let it step shards."""

BY_PARAMETER: set[type[Optimizer]] = {optim.Adafactor, optim.Muon, optim.SparseAdam}
"""Further optimizers that update each parameter independently of all others, but not each element."""


def steps_each_parameter(optimizer: Optimizer) -> bool:
    """Return whether the optimizer steps parameters independently: a known class, or an attribute of this name."""
    declared = getattr(optimizer, "steps_each_parameter", False)
    return bool(declared) or steps_as_one_of(ELEMENTWISE | BY_PARAMETER, optimizer)


def steps_as_one_of(kinds: Iterable[type[Optimizer]], optimizer: Optimizer) -> bool:
    """Return whether the optimizer is of one of these classes, or of a subclass that does not override their step."""
    kind = type(optimizer)
    for known in kinds:
        names = ("step", "_init_group") if "_init_group" in vars(known) else ("step",)
        # unwrap: torch wraps `step` of a class when the first optimizer of it is made
        if issubclass(kind, known) and all(
            inspect.unwrap(getattr(kind, name)) is inspect.unwrap(getattr(known, name)) for name in names
        ):
            return True
    return False
