"""Functions of one number that steps log of a mean: those of a batch are those of the mean over the batch.

A perplexity is the exponential of a mean loss, a root mean square error the root of a mean. The mean over parts of
either is another number. So ranks undo the function, put the mean together, and take the function of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Function(NamedTuple):
    of: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]


FUNCTIONS = {
    "exp": _Function(torch.exp, torch.log),
    "exp2": _Function(torch.exp2, torch.log2),
    "expm1": _Function(torch.expm1, torch.log1p),
    "log": _Function(torch.log, torch.exp),
    "log2": _Function(torch.log2, torch.exp2),
    "log10": _Function(torch.log10, lambda value: 10**value),
    "log1p": _Function(torch.log1p, torch.expm1),
    "sqrt": _Function(torch.sqrt, torch.square),
}
"""By the names of torch's functions."""

ERROR = 1e-13
"""How far a number may be, by rounding, from the one of which it is a function in double precision."""


def taken_by(name: str, args: Any) -> str:
    """Which of these functions an operation takes of its first argument; empty for all others."""
    if name in ("pow", "__pow__") and len(args) == 2 and type(args[1]) is float and args[1] == 0.5:
        return "sqrt"
    return name if name in FUNCTIONS else ""


def taken(function: str, value: Tensor) -> Tensor:
    """The function of a value; without one the value."""
    return FUNCTIONS[function].of(value) if function else value


def undone(function: str, value: Tensor) -> Tensor:
    """What a function was taken of, in double precision; without one the value."""
    return FUNCTIONS[function].inverse(value.double()) if function else value
