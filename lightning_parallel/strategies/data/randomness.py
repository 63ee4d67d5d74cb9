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
    """Snapshot of the host's generators, optionally also of one generator of the user's and of a device's."""

    torch_state: Tensor
    numpy_state: tuple[Any, ...]
    python_state: tuple[Any, ...]
    own_state: Tensor | None = None
    device_state: Tensor | None = None

    @classmethod
    def now(cls, own: torch.Generator | None = None, device: torch.device | None = None) -> RandomState:
        """Return the present state, with that of the user's generator `own` and of `device` if this is a GPU."""
        numpy_state = np.random.get_state(legacy=True)
        own_state = None if own is None else own.get_state()
        device_state = None
        if device is not None and device.type == "cuda":
            device_state = torch.cuda.get_rng_state(device)
        return cls(torch.get_rng_state(), tuple(numpy_state), random.getstate(), own_state, device_state)

    def equals(self, other: RandomState) -> bool:
        """Return whether the host's states, and the device's if both snapshots have one, are equal."""
        kind, keys, *rest = self.numpy_state
        other_kind, other_keys, *other_rest = other.numpy_state
        same = (kind, rest, self.python_state) == (other_kind, other_rest, other.python_state)
        pairs = [(self.torch_state, other.torch_state)]
        if self.device_state is not None and other.device_state is not None:
            pairs.append((self.device_state, other.device_state))
        return same and bool((keys == other_keys).all()) and all(torch.equal(*pair) for pair in pairs)

    def restore(self, own: torch.Generator | None = None, device: torch.device | None = None) -> None:
        """Set the generators to this state; `own` and `device` only if the snapshot includes theirs."""
        torch.set_rng_state(self.torch_state)
        np.random.set_state(self.numpy_state)
        random.setstate(self.python_state)
        if own is not None and self.own_state is not None:
            own.set_state(self.own_state)
        if device is not None and device.type == "cuda" and self.device_state is not None:
            torch.cuda.set_rng_state(self.device_state, device)

    @contextmanager
    def replayed(self, own: torch.Generator | None = None) -> Iterator[None]:
        """Inside, the host's generators continue from this state; afterwards they have their previous state again.

        The user's generator `own` keeps the state after the replay, as in a run that was never interrupted.
        """
        before = RandomState.now()  # without `own`, whose draws inside are not undone
        self.restore(own)
        try:
            yield
        finally:
            before.restore()

    def as_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values, which `torch.load(weights_only=True)` can read."""
        kind, keys, *rest = self.numpy_state
        numpy_state = (kind, torch.from_numpy(keys.astype("int64")), *rest)
        states = {"torch": self.torch_state, "own": self.own_state, "device": self.device_state}
        return {**states, "numpy": numpy_state, "python": self.python_state}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> RandomState:
        """Return the state from the result of `as_dict`."""
        kind, keys, *rest = state["numpy"]
        version, internal, gauss_next = state["python"]
        numpy_state = (kind, keys.numpy().astype("uint32"), *rest)
        return cls(state["torch"], numpy_state, (version, tuple(internal), gauss_next), state["own"], state["device"])


def seed_per_data_rank(device: torch.device, data_rank: int, group: dist.ProcessGroup) -> None:
    """Make dropout masks differ between ranks that read different samples, and equal on ranks that read the same.

    Collective over `group`. Also called after random states were restored from a checkpoint, perhaps of another layout;
    states that already differ between data ranks are kept. Only the device's generator is changed: the host's stays the
    same on all ranks, because models decide by it which layers to run (layer drop), and ranks that gather parameters
    must run the same ones.

    Args:
        device: the device of this rank.
        data_rank: index of the samples that this rank reads; the same on ranks that read the same samples.
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
        # far apart, because users may seed their next run by the next integer
        torch.cuda.manual_seed(torch.initial_seed() + 1_000_003 * data_rank)


def state_of_data_rank(data_rank: int, states: Sequence[tuple[int, bytes]]) -> bytes | None:
    """Return the state of the first rank with this data rank; None if a lower data rank has the same state.

    Args:
        data_rank: the data rank whose state is returned.
        states: for each rank, its data rank and its state.
    """
    first_states: dict[int, bytes] = {}
    for other, state in states:
        # ranks that read the same samples must draw the same masks: the first of them decides
        first_states.setdefault(other, state)
    is_used = any(other < data_rank and state == first_states[data_rank] for other, state in first_states.items())
    return None if is_used else first_states[data_rank]


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that the user passed to a loader or its samplers."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    candidates = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in candidates if isinstance(generator, torch.Generator)]
