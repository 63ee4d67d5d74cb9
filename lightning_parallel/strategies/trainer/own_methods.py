"""Methods beside `step` by which optimizers of third parties act on parameters; all ranks must call them alike."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from lightning_parallel.techniques.gradients.stored_optimizer import StoredOptimizer

METHODS = ("train", "eval", "first_step", "second_step", "ascent_step", "descent_step")
"""Of schedule-free optimizers and of sharpness-aware ones."""


def run_on_stored(stored: StoredOptimizer, wrappers: Iterable[Any]) -> None:
    """Let them find parameters, gradients and states as `step` does, on an optimizer and on Lightning's wrappers."""
    optimizer = stored.optimizer
    for name in METHODS:
        method = getattr(type(optimizer), name, None)
        if method is not None:
            run = functools.wraps(method)(functools.partial(stored.run, functools.partial(method, optimizer)))
            for owner in (optimizer, *wrappers):
                vars(owner)[name] = run
