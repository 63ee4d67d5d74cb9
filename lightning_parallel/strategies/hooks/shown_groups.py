"""The groups of optimizers as one device has them, for hooks that look at parameters there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch.optim import Optimizer

from lightning_parallel.techniques.gradients.groups import Pair, exchange, turned


@contextmanager
def wholes_in_groups(optimizers: Callable[[], Sequence[Optimizer]], pairs: Sequence[Pair]) -> Iterator[None]:
    """Inside, groups hold whole parameters, as the tree does, and what a hook adds there is what it found.

    So do their states; afterwards both belong to divided parameters, in optimizers that the hook made, too.

    Args:
        optimizers: says which the trainer has now.
        pairs: what stands for what.
    """
    for optimizer in optimizers() if pairs else ():
        exchange(optimizer, pairs)
    try:
        yield
    finally:
        for optimizer in optimizers() if pairs else ():
            exchange(optimizer, turned(pairs))


@contextmanager
def divided_in_groups(optimizer: Optimizer, pairs: Sequence[Pair]) -> Iterator[None]:
    """Within such a hook, as where it saves a checkpoint: an optimizer as it steps."""
    exchange(optimizer, turned(pairs))
    try:
        yield
    finally:
        exchange(optimizer, pairs)
