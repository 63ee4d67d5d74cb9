"""Random states of a rank on the host (torch, NumPy, Python) and on its device, as plain values."""

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
    """A snapshot of the host's generators, with one of the user's, or those of a device, if they were asked for."""

    torch_state: Tensor
    numpy_state: tuple[Any, ...]
    python_state: tuple[Any, ...]
    own_state: Tensor | None = None
    device_state: Tensor | None = None

    @classmethod
    def now(cls, own: torch.Generator | None = None, device: torch.device | None = None) -> RandomState:
        """The state at this moment."""
        numpy_state = np.random.get_state(legacy=True)
        own_state = None if own is None else own.get_state()
        device_state = None
        if device is not None and device.type == "cuda":
            device_state = torch.cuda.get_rng_state(device)
        return cls(torch.get_rng_state(), tuple(numpy_state), random.getstate(), own_state, device_state)

    def equals(self, other: RandomState) -> bool:
        """Whether the host's generators, and those of a device that both know, stand at the same place in both."""
        kind, keys, *rest = self.numpy_state
        other_kind, other_keys, *others = other.numpy_state
        same = (kind, rest, self.python_state) == (other_kind, others, other.python_state)
        pairs = [(self.torch_state, other.torch_state)]
        if self.device_state is not None and other.device_state is not None:
            pairs.append((self.device_state, other.device_state))
        return same and bool((keys == other_keys).all()) and all(torch.equal(*pair) for pair in pairs)

    def restore(self, own: torch.Generator | None = None, device: torch.device | None = None) -> None:
        """Let the generators continue from here."""
        torch.set_rng_state(self.torch_state)
        np.random.set_state(self.numpy_state)
        random.setstate(self.python_state)
        if own is not None and self.own_state is not None:
            own.set_state(self.own_state)
        if device is not None and device.type == "cuda" and self.device_state is not None:
            torch.cuda.set_rng_state(self.device_state, device)

    @contextmanager
    def replayed(self, own: torch.Generator | None = None) -> Iterator[None]:
        """Inside, the host's generators continue from here; afterwards they are where they were.

        The user's own generator stays where the replay left it, as in a run that was never interrupted.
        """
        # without `own`: what that has drawn inside, it has drawn
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
        states = {"torch": self.torch_state, "own": self.own_state, "device": self.device_state}
        return {**states, "numpy": numpy_state, "python": self.python_state}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> RandomState:
        """Read what `as_dict` wrote."""
        kind, keys, *rest = state["numpy"]
        version, internal, gauss_next = state["python"]
        numpy_state = (kind, keys.numpy().astype("uint32"), *rest)
        return cls(state["torch"], numpy_state, (version, tuple(internal), gauss_next), state["own"], state["device"])


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
        # far apart, for users may seed the next run by the next number
        torch.cuda.manual_seed(torch.initial_seed() + 1_000_003 * data_rank)


def state_of_data_rank(data_rank: int, states: Sequence[tuple[int, bytes]]) -> bytes | None:
    """The state of the first rank of a data rank; None if one of a lower data rank has the same state.

    Args:
        data_rank: whose state.
        states: the data rank and the state of each rank.
    """
    firsts: dict[int, bytes] = {}
    for other, state in states:
        # ranks that share samples must draw alike: the first of them decides
        firsts.setdefault(other, state)
    taken = any(other < data_rank and state == firsts[data_rank] for other, state in firsts.items())
    return None if taken else firsts[data_rank]


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a user gave a loader or its samplers."""
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in found if isinstance(generator, torch.Generator)]
