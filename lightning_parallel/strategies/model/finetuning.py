"""Shows finetuning callbacks, where ranks hold parts of a model, all parameters, told apart by identity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from lightning_parallel.strategies.lightning_package import BaseFinetuning, Callback


def adds_parameters(callbacks: Iterable[Callback]) -> bool:
    """Whether any callback may add parameters to an optimizer when an epoch starts."""
    return any(isinstance(callback, BaseFinetuning) for callback in callbacks)


@contextmanager
def known_by_identity() -> Iterator[None]:
    """Inside, a parameter is in an optimizer if it is that very one.

    Lightning compares values instead, which are at hand neither for shards nor for what another rank holds.
    """
    own = vars(BaseFinetuning)["filter_on_optimizer"]
    _set(staticmethod(_not_in))
    try:
        yield
    finally:
        _set(own)


def _set(function: Any) -> None:
    BaseFinetuning.filter_on_optimizer = function  # type: ignore[method-assign]


def _not_in(optimizer: Optimizer, params: Iterable[Any]) -> list[Any]:
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in params if id(parameter) not in known]
