"""Regions without values: what enters and leaves them has its shape only, and ranks' own activations are marked."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_parallel.techniques.tensor_parallel.activations import Activations, Mode
from lightning_parallel.techniques.tensor_parallel.check.trial import Trial
from lightning_parallel.techniques.tensor_parallel.randomness import OwnRandomness
from lightning_parallel.techniques.tools.shards import bounds


class DryActivations(Activations):
    """Enters and leaves regions in shape only, and tells a trial what ranks have alike and what they divide."""

    def __init__(self, ranks: int, rank: int, sequence_dim: int, trial: Trial) -> None:
        self.ranks, self.rank, self.sequence_dim = ranks, rank, sequence_dim
        self.length, self.mode, self.form = None, Mode(), None
        self._drops = False
        self._randomness = OwnRandomness(rank)
        self._inside, self._entered, self._face, self._trial = False, None, None, trial
        self._regathers, self._regathered = False, None

    def enter(self, x: Tensor) -> Tensor:  # noqa: D102
        entered = super().enter(x)
        if entered is x and self._trial.is_activation(x):
            raise RuntimeError("an activation that ranks have alike gets into a region by a way that sums no gradient")
        return entered if self._trial.is_tainted(entered) else self._trial.taint(_fresh(x, tuple(x.shape)))

    def _enter(self, x: Tensor) -> Tensor:
        if self.length is not None and not (self._trial.is_tainted(x) and self._is_part(x)):
            raise RuntimeError(f"what enters a region, of shape {tuple(x.shape)}, is no part of the split sequence")
        self._trial.take(x)
        return self._trial.taint(self._resized(x, self.length))

    def _is_part(self, x: Tensor) -> bool:
        return x.dim() > self.sequence_dim and x.shape[self.sequence_dim] == self.own_length

    def leave(self, y: Tensor) -> Tensor:  # noqa: D102
        self.forget()
        if self.length is not None and y.shape[self.sequence_dim] != self.length:
            raise RuntimeError(f"a rowwise module gets {y.shape[self.sequence_dim]} of {self.length} positions")
        hidden = self._resized(y, self.own_length)
        return self._trial.taint(hidden) if self.length is not None else self._trial.mark_activation(hidden)

    def join_features(self, y: Tensor, features: int, parts: tuple[int, ...] = ()) -> Tensor:  # noqa: D102
        return self._trial.mark_activation(_fresh(y, (*y.shape[:-1], features)))

    def own_features(self, x: Tensor) -> Tensor:  # noqa: D102
        start, stop = bounds(x.shape[-1], self.ranks, self.rank)
        self._trial.take(x)
        return self._trial.taint(_fresh(x, (*x.shape[:-1], stop - start)))

    def split(self, hidden: Tensor) -> Tensor:  # noqa: D102
        self.length = hidden.shape[self.sequence_dim]
        return self._resized(hidden, self.own_length)

    def face_of(self, entered: Tensor) -> Tensor:  # noqa: D102
        if entered.shape[-1] % self.ranks:
            raise RuntimeError(f"{entered.shape[-1]} features are not the same number on all ranks")
        return self._trial.mark_face(super().face_of(entered))

    def _resized(self, x: Tensor, length: int | None) -> Tensor:
        shape = list(x.shape)
        if length is not None:
            shape[self.sequence_dim] = length
        return _fresh(x, tuple(shape))


def _fresh(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor that comes from no other one."""
    return torch.empty(shape, dtype=like.dtype, device="meta")
