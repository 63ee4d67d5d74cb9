"""The groups of optimizers as one device has them, for hooks that look at parameters there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

Pair = tuple[Tensor, Tensor]
"""A parameter of which ranks hold parts, and the whole one that stands for it."""


@contextmanager
def wholes_in_groups(optimizers: Callable[[], Sequence[Optimizer]], pairs: Sequence[Pair]) -> Iterator[None]:
    """Inside, groups hold whole parameters, as the tree does, and what a hook adds there is what it found.

    So do their states; afterwards both belong to divided parameters, in optimizers that the hook made, too.

    Args:
        optimizers: says which the trainer has now.
        pairs: what stands for what.
    """
    for optimizer in optimizers() if pairs else ():
        _exchange(optimizer, pairs)
    try:
        yield
    finally:
        for optimizer in optimizers() if pairs else ():
            _exchange(optimizer, _turned(pairs))


@contextmanager
def divided_in_groups(optimizer: Optimizer, pairs: Sequence[Pair]) -> Iterator[None]:
    """Within such a hook, as where it saves a checkpoint: an optimizer as it steps."""
    _exchange(optimizer, _turned(pairs))
    try:
        yield
    finally:
        _exchange(optimizer, pairs)


def _turned(pairs: Sequence[Pair]) -> list[Pair]:
    return [(after, before) for before, after in pairs]


def _exchange(optimizer: Optimizer, pairs: Sequence[Pair]) -> None:
    """Puts the second of each pair where the first is: in groups, and as that which a state belongs to."""
    after_of = {id(before): after for before, after in pairs}
    for group in optimizer.param_groups if pairs else ():
        group["params"][:] = [after_of.get(id(parameter), parameter) for parameter in group["params"]]
    for before, after in pairs:
        if before in optimizer.state:
            optimizer.state[after] = optimizer.state.pop(before)
