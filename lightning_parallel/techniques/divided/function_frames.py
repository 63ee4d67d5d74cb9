"""Where a function of autograd that is written in Python runs, as its frames tell."""

from __future__ import annotations

import sys
from types import FrameType

from torch.autograd.function import BackwardCFunction, Function

OF_FUNCTIONS = frozenset(
    (Function.apply.__func__.__code__, BackwardCFunction.apply.__code__)  # type: ignore[attr-defined]
)
"""The frames below the forward and the backward of such a function."""


def in_function() -> bool:
    """Whether a function of autograd written in Python runs: what it returns must not be divided.

    Such a function may use tensors that it was not given, as a parameter of the module in whose forward it is written.
    Gradients are off in it, so nobody asks on the usual way. A reentrant checkpoint only runs a layer.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in OF_FUNCTIONS:
            cls = frame.f_locals.get("cls") or type(frame.f_locals["self"])
            return not cls.__name__.startswith("CheckpointFunction")
        frame = frame.f_back
    return False
