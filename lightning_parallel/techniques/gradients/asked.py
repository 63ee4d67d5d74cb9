"""Who asks for the gradient of a parameter: the user's code, or what computes with it here.

For a while `grad` is a property of parameters, so that the user's reads and writes are seen. To a compiler it is the
same attribute: compiled blocks have the same graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

OWN: Any = Tensor.grad
"""The attribute itself: `OWN.__get__(parameter)`."""

INNER = ("lightning_parallel.", "torch.distributed.", "torch._dynamo", "torch._functorch", "torch._subclasses")
"""Modules that read gradients for themselves; what they call, or who calls them, sees nothing of it."""


def is_being_asked() -> bool:
    """Whether somebody sees reads of gradients already."""
    return "grad" in vars(nn.Parameter)


def ask(read: Callable[[nn.Parameter], Tensor | None], write: Callable[[nn.Parameter, Tensor | None], None]) -> None:
    """From now on these are called for what becomes of `parameter.grad`; `ask_no_more` ends it."""
    nn.Parameter.grad = property(read, write, OWN.__delete__)  # type: ignore[assignment]


def ask_no_more() -> None:
    """Takes `ask` back."""
    del nn.Parameter.grad


def is_inner(*through: str) -> bool:
    """Whether code that reads gradients for itself asks.

    Args:
        through: modules by which it asks, beside this one; modes of torch are no askers either.
    """
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__") in through or frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith(INNER)
