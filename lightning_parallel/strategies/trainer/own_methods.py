"""Methods of the user's optimizers, beside `step`, that act on parameters: to swap averages in, to climb before a step.

Schedule-free optimizers have `train` and `eval`, sharpness-aware ones `first_step` and `second_step`. They find
parameters, gradients and states as `step` does. All ranks must call them alike.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch.optim import Optimizer

from lightning_parallel.strategies.hooks.looking import asks_for_params
from lightning_parallel.techniques.gradients.stored_optimizer import StoredOptimizer


def run_on_stored(stored: StoredOptimizer, wrappers: Iterable[Any]) -> None:
    """Lets them run on what is stepped.

    Args:
        stored: says what that is.
        wrappers: objects that have its methods.
    """
    optimizer = stored.optimizer
    for name in set(own_methods(type(optimizer))):
        if asks_for_params(optimizer, name):
            method = getattr(type(optimizer), name)
            run = functools.wraps(method)(functools.partial(stored.run, MethodType(method, optimizer)))
            for owner in (optimizer, *wrappers):
                vars(owner)[name] = run


def own_methods(kind: type) -> Iterator[str]:
    """The public methods that torch's optimizers do not have."""
    for each in kind.__mro__[: kind.__mro__.index(Optimizer)]:
        own = (name for name, value in vars(each).items() if isinstance(value, FunctionType))
        yield from (name for name in own if not name.startswith("_") and name not in vars(Optimizer))
