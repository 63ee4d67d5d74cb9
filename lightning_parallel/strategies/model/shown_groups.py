"""The groups of optimizers as one device has them, for hooks that look at parameters there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Pair = tuple[Tensor, Tensor]
"""A parameter of which ranks hold parts, and the whole one that stands for it."""


@contextmanager
def wholes_in_groups(optimizers: Callable[[], Sequence[Optimizer]], pairs: Sequence[Pair]) -> Iterator[None]:
    """Inside, groups hold whole parameters, as the tree does, and what a hook adds there is what it found.

    The state of a parameter is there under both; afterwards groups hold divided parameters, those of optimizers that
    the hook made, too.

    Args:
        optimizers: says which the trainer has now.
        pairs: what stands for what.
    """
    whole = {id(divided): made for divided, made in pairs}
    for optimizer in optimizers() if whole else ():
        _exchange(optimizer, whole)
        for divided, made in pairs:
            if divided in optimizer.state:
                optimizer.state[made] = optimizer.state[divided]
    try:
        yield
    finally:
        divided_of = {id(made): divided for divided, made in pairs}
        for optimizer in optimizers() if whole else ():
            _exchange(optimizer, divided_of)
            _rename_states(optimizer, pairs)


def _exchange(optimizer: Optimizer, by_id: Mapping[int, Any]) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [by_id.get(id(parameter), parameter) for parameter in group["params"]]


def _rename_states(optimizer: Optimizer, pairs: Sequence[Pair]) -> None:
    """What a hook removed is gone; what it made, as the state of a parameter that had none, is the divided one's."""
    for divided, made in pairs:
        if made in optimizer.state:
            optimizer.state[divided] = optimizer.state.pop(made)
        else:
            optimizer.state.pop(divided, None)
