"""The random state of a rank on the host (torch, NumPy, Python) and on its device, as plain values."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.strategies.ranks.agreement import gather_objects


@dataclass(frozen=True)
class RandomState:
    """A snapshot of the host's generators, with one generator of the user's if there is one."""

    torch_state: Tensor
    numpy_state: tuple[Any, ...]
    python_state: tuple[Any, ...]
    own_state: Tensor | None = None

    @classmethod
    def now(cls, own: torch.Generator | None = None) -> RandomState:
        """The state at this moment."""
        numpy_state = np.random.get_state(legacy=True)
        own_state = None if own is None else own.get_state()
        return cls(torch.get_rng_state(), tuple(numpy_state), random.getstate(), own_state)

    def equals(self, other: RandomState) -> bool:
        """Whether the host's generators stand at the same place in both."""
        kind, keys, *rest = self.numpy_state
        other_kind, other_keys, *others = other.numpy_state
        same = (kind, rest, self.python_state) == (other_kind, others, other.python_state)
        return same and bool((keys == other_keys).all()) and torch.equal(self.torch_state, other.torch_state)

    def restore(self, own: torch.Generator | None = None) -> None:
        """Let the generators continue from here."""
        torch.set_rng_state(self.torch_state)
        np.random.set_state(self.numpy_state)
        random.setstate(self.python_state)
        if own is not None and self.own_state is not None:
            own.set_state(self.own_state)

    @contextmanager
    def replayed(self, own: torch.Generator | None = None) -> Iterator[None]:
        """Inside, the host's generators continue from here; afterwards they are where they were.

        The user's own generator stays where the replay left it, as in a run that was never interrupted.
        """
        before = RandomState.now()
        self.restore(own)
        try:
            yield
        finally:
            before.restore()

    def as_dict(self) -> dict[str, Any]:
        """The state as tensors and plain values, which a checkpoint may hold and a safe reader reads."""
        kind, keys, *rest = self.numpy_state
        numpy_state = (kind, torch.from_numpy(keys.astype("int64")), *rest)
        return {"torch": self.torch_state, "numpy": numpy_state, "python": self.python_state, "own": self.own_state}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> RandomState:
        """Read what `as_dict` wrote."""
        kind, keys, *rest = state["numpy"]
        version, internal, gauss_next = state["python"]
        numpy_state = (kind, keys.numpy().astype("uint32"), *rest)
        return cls(state["torch"], numpy_state, (version, tuple(internal), gauss_next), state["own"])


@dataclass(frozen=True)
class RankRandomness:
    """Everything that one rank draws from."""

    host: RandomState
    device_state: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RankRandomness:
        """The state at this moment."""
        return cls(RandomState.now(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        """Let all generators continue from here."""
        self.host.restore()
        if self.device_state is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.device_state, device)

    def as_dict(self) -> dict[str, Any]:
        """See `RandomState.as_dict`."""
        return {"host": self.host.as_dict(), "device": self.device_state}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> RankRandomness:
        """Read what `as_dict` wrote."""
        return cls(RandomState.from_dict(state["host"]), state["device"])


def seed_per_data_rank(device: torch.device, data_rank: int, group: dist.ProcessGroup) -> None:
    """Let dropout draw other masks on ranks that read other samples, and the same on those that share them.

    Collective over `group`, also after states of a checkpoint, perhaps of another layout, were restored. Only the
    device's generator is moved: the host's stays alike on all ranks, because models decide by it what to run (layer
    drop), and ranks that gather parameters must decide alike. States that differ between data ranks already go on.

    Args:
        device: of this rank.
        data_rank: the number of the samples that it reads; ranks that share samples have the same.
        group: all ranks.
    """
    if device.type != "cuda":
        return
    states = gather_objects((data_rank, torch.cuda.get_rng_state(device).numpy().tobytes()), group)
    state = state_of_data_rank(data_rank, states)
    if state is not None:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), device)
        return
    with torch.cuda.device(device):
        torch.cuda.manual_seed(torch.initial_seed() + 1_000_003 * data_rank)


def state_of_data_rank(data_rank: int, states: Sequence[tuple[int, bytes]]) -> bytes | None:
    """The state of the first rank of a data rank; None if one of a lower data rank has the same state.

    Args:
        data_rank: whose state.
        states: the data rank and the state of each rank.
    """
    firsts: dict[int, bytes] = {}
    for other, state in states:
        firsts.setdefault(other, state)
    taken = any(other < data_rank and state == firsts[data_rank] for other, state in firsts.items())
    return None if taken else firsts[data_rank]


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a user gave a loader or its samplers."""
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in found if isinstance(generator, torch.Generator)]
