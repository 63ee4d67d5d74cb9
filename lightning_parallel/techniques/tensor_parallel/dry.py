"""Regions without values: what enters and leaves them has its shape only, and ranks' own activations are marked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_parallel.techniques.shards import bounds
from lightning_parallel.techniques.tensor_parallel.activations import Activations
from lightning_parallel.techniques.tensor_parallel.randomness import OwnRandomness

Taint = Callable[[Tensor], Tensor]
"""Marks a tensor of which ranks have different ones."""


class DryActivations(Activations):
    """Enters and leaves regions in shape only."""

    def __init__(self, ranks: int, rank: int, sequence_dim: int, taint: Taint) -> None:
        self.ranks, self.rank, self.sequence_dim = ranks, rank, sequence_dim
        self.length = None
        self._drops = False
        self._randomness = OwnRandomness(rank)
        self.hidden: Tensor | None = None
        self._inside, self._entered, self._taint = False, None, taint
        self._regathers, self._regathered = False, None

    def _enter(self, x: Tensor) -> Tensor:
        return self._taint(self._resized(x, self.length))

    def leave(self, y: Tensor) -> Tensor:  # noqa: D102
        self.forget()
        if self.length is not None and y.shape[self.sequence_dim] != self.length:
            raise RuntimeError(f"a rowwise module gets {y.shape[self.sequence_dim]} of {self.length} positions")
        hidden = self._resized(y, self.own_length)
        return self._taint(hidden) if self.length is not None else hidden

    def join_features(self, y: Tensor, features: int) -> Tensor:  # noqa: D102
        return _fresh(y, (*y.shape[:-1], features))

    def own_features(self, x: Tensor) -> Tensor:  # noqa: D102
        start, stop = bounds(x.shape[-1], self.ranks, self.rank)
        return self._taint(_fresh(x, (*x.shape[:-1], stop - start)))

    def split(self, hidden: Tensor) -> Tensor:  # noqa: D102
        self.length = hidden.shape[self.sequence_dim]
        self.hidden = self._resized(hidden, self.own_length)
        return self.hidden

    def _resized(self, x: Tensor, length: int | None) -> Tensor:
        shape = list(x.shape)
        if length is not None:
            shape[self.sequence_dim] = length
        return _fresh(x, tuple(shape))


def _fresh(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor that comes from no other one."""
    return torch.empty(shape, dtype=like.dtype, device="meta")
