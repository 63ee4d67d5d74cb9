"""Hooks around the steps of an optimizer, of any class."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from types import FrameType, MethodType
from typing import Any

from torch.optim import Optimizer

Before = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Gets the arguments of a step, the optimizer first, and may return others."""


class HookedSteps:
    """Calls something before and after each step of an optimizer, but not around steps that a step runs.

    Torch runs hooks in the `step` of each class of which an optimizer was made in this process. So where one calls
    `super().step()` they run twice, or once where nobody has made one of the other class: on some ranks only, perhaps.

    Args:
        optimizer: the user's.
        before: see `Before`.
        after: not called where a step raised. The user's own hooks, which may average weights, come later.
    """

    def __init__(self, optimizer: Optimizer, before: Before, after: Callable[[], None]) -> None:
        self._before, self._after = before, after
        self._outer: FrameType | None = None
        """In which the step runs, or ran until it raised."""
        _make_hookable(optimizer)
        optimizer.register_step_pre_hook(self._begin)
        handle = optimizer.register_step_post_hook(self._end)
        hooks: Any = handle.hooks_dict_ref()
        hooks.move_to_end(handle.id, last=False)

    def _begin(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame = sys._getframe(1)
        if self._outer is not None and _runs_in(frame, self._outer):
            return None
        self._outer = frame
        return self._before(args, kwargs)

    def _end(self, *_: Any) -> None:
        if sys._getframe(1) is self._outer:
            self._outer = None
            self._after()


def _runs_in(frame: FrameType | None, outer: FrameType) -> bool:
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is outer


def _make_hookable(optimizer: Optimizer) -> None:
    """Gives an optimizer that wraps another one what `Optimizer.__init__`, which it may never have run, would make.

    That patches the class; this patches what lives as long as the run.
    """
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        vars(optimizer).setdefault(name, OrderedDict())
    run = optimizer.step
    if any("hooked" in vars(each) for each in (type(optimizer).step, getattr(run, "__func__", run))):
        return

    @wraps(run)
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    vars(optimizer)["step"] = MethodType(Optimizer.profile_hook_step(step), optimizer)
