"""Who asks for the gradient of a parameter: the user's code, or what computes with it here.

For a while `grad` is a property of parameters, so that the user's reads and writes are seen. To a compiler it is the
same attribute: compiled blocks have the same graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

OWN: Any = Tensor.grad
"""The attribute itself: `OWN.__get__(parameter)`."""

INNER = ("lightning_parallel.", "torch.distributed.", "torch._dynamo", "torch._functorch", "torch._subclasses")
"""Modules that read gradients for themselves; what they call, or who calls them, sees nothing of it."""


LOOKS_WHOLE = "lightning_parallel.techniques.divided.tensor"
"""What stands for a parameter that ranks divide: it reads the gradient of that for who asks."""


ZEROING = ("torch.nn.modules.module.zero_grad", "torch.optim.optimizer.zero_grad")


class Given:
    """Which gradients may be given by the user: of parameters that no backward went to since they were stepped.

    It is known at no cost in a backward. Where it is said too often, as of two steps by one gradient, means of means
    are the same.
    """

    def __init__(self) -> None:
        self.stepped: set[int] | None = None
        """The `id` of parameters that were stepped since the last backward; None before the first: all may be given."""

    def among(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether there are such among those that are about to be stepped."""
        return self.stepped is None or not self.stepped.isdisjoint(map(id, parameters))

    def step(self, parameters: Sequence[nn.Parameter]) -> None:
        """They are stepped now."""
        if self.stepped is not None:
            self.stepped.update(map(id, parameters))


def watch(
    read: Callable[[nn.Parameter], Tensor | None], write: Callable[[nn.Parameter, Tensor | None], None]
) -> property:
    """What `ask` takes: these are called for what becomes of `parameter.grad`."""
    return property(read, write, OWN.__delete__)


def ask(watching: property) -> bool:
    """From now on reads of gradients are seen, unless somebody sees them already; `ask_no_more` ends it.

    Returns:
        Whether they were not seen.
    """
    if "grad" in vars(nn.Parameter):
        return False
    nn.Parameter.grad = DTensor.grad = watching  # type: ignore[assignment]
    return True


def is_asked(watching: property) -> bool:
    """Whether it is this one that sees reads now."""
    return vars(nn.Parameter).get("grad") is watching


def ask_no_more() -> None:
    """Takes `ask` back."""
    del nn.Parameter.grad, DTensor.grad


def is_inner(*through: str) -> bool:
    """Whether code that reads gradients for itself asks.

    Args:
        through: modules by which it asks, beside this one; modes of torch are no askers either.
    """
    return _asker(*through).startswith(INNER)


def is_zeroing(*through: str) -> bool:
    """Whether torch's `zero_grad` asks, of a module or an optimizer, which needs no values; see `is_inner`."""
    return _asker(*through) in ZEROING


def _asker(*through: str) -> str:
    """The module of the code that asks, and its function where it is torch's."""
    frame: Any = sys._getframe(2)
    while frame.f_globals.get("__name__") in (*through, LOOKS_WHOLE) or frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
