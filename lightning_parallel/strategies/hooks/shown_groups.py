"""The groups of optimizers as one device has them, for hooks that look at parameters there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.optim import Optimizer

from lightning_parallel.techniques.gradients.groups import Pair, exchange, turned


@contextmanager
def divided_in_groups(optimizer: Optimizer, pairs: Sequence[Pair]) -> Iterator[None]:
    """Within such a hook, as where it saves a checkpoint: an optimizer as it steps."""
    exchange(optimizer, turned(pairs))
    try:
        yield
    finally:
        exchange(optimizer, pairs)
