"""A sampler that yields a rank's part of what the user's sampler yields, and goes on from where a checkpoint stands."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Sampler

from lightning_parallel.strategies.data.randomness import RandomState
from lightning_parallel.strategies.data.sharding import DataSharding, PassNotes

GLOBAL_BATCH = "global_batch"
"""Where a position holds how many items of the sampler one global batch took."""


class DividedSampler(Sampler[Any]):
    """A sampler that yields this rank's part of what the user's sampler yields.

    It is resumable: the order is a function of the random state in which the user's sampler started, which is kept.
    It has no `state_dict`: torchdata's loaders would call that, and count the position a second time.

    Args:
        source: the user's sampler of single samples, or a sampler of whole batches, which are dealt in turn.
        sharding: of the data.
        batch_size: the number of samples of a rank in one batch; None for a sampler of whole batches.
        drop_last: whether a last global batch of fewer samples is left out.
    """

    def __init__(
        self, source: Any, sharding: DataSharding, batch_size: int | None = None, drop_last: bool = False
    ) -> None:
        self._deals = batch_size is None
        #: on which Lightning calls `set_epoch`, as on one device: `loader.batch_sampler.sampler`
        self.source, self.sampler = source, getattr(source, "sampler", None) if self._deals else source
        self.batch_size = getattr(source, "batch_size", None) if self._deals else batch_size
        self.drop_last = getattr(source, "drop_last", False) if self._deals else drop_last
        self._drops = not self._deals and drop_last
        #: the number of items of the user's sampler that one global batch takes
        self.items_per_batch = (batch_size or 1) * sharding.ranks
        self.sharding, self.latest = sharding, PassNotes()
        self._started_with: RandomState | None = None
        self._resume: tuple[RandomState, int] | None = None

    @property
    def generator(self) -> torch.Generator | None:
        """The user's own generator, if the sampler draws from one."""
        found = (getattr(owner, "generator", None) for owner in (self.source, self.sampler))
        return next((generator for generator in found if isinstance(generator, torch.Generator)), None)

    def __iter__(self) -> Iterator[Any]:
        self.latest = PassNotes()
        return self._parts(self.latest)

    def _parts(self, notes: PassNotes) -> Iterator[Any]:
        items, first = self._start()
        number = 0
        while batch := list(islice(items, self.items_per_batch)):
            if self._drops and len(batch) < self.items_per_batch:
                break
            if self._deals:
                sizes = [len(each) if isinstance(each, Sized) else 1 for each in batch]
                part, share = self.sharding.round_robin(batch, sizes)
            else:
                part, share = self.sharding.part(batch)
            notes.order = notes.order or checksum(batch)
            notes.note(number, share, self.sharding.ranks)
            yield part
            number += 1
        notes.length = first + number

    def __len__(self) -> int:
        full, rest = divmod(len(self.source), self.items_per_batch)
        return full + (rest > 0 and not self._drops)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the user's sampler; Lightning calls this where the sampler yields whole batches."""
        if callable(set_epoch := getattr(self.source, "set_epoch", None)):
            set_epoch(epoch)

    def _start(self) -> tuple[Iterator[Any], int]:
        if self._resume is None:
            self._started_with = RandomState.now(self.generator)
            return iter(self.source), 0
        (state, consumed), self._resume = self._resume, None
        self._started_with = state
        with state.replayed(self.generator):
            items = iter(self.source)
            for _ in islice(items, consumed):
                pass
        return items, consumed // self.items_per_batch

    def position_after(self, batches: int) -> dict[str, Any]:
        """The position in the epoch after so many batches."""
        length = self.latest.length if (known := length_of(self)) is None else known
        finished = length is not None and batches >= length
        started = None if finished else self._started_with
        consumed = 0 if finished else batches * self.items_per_batch
        random = (started or RandomState.now(self.generator)).as_dict()
        return {"consumed": consumed, "random": random, GLOBAL_BATCH: self.items_per_batch}

    def go_on_from(self, position: dict[str, Any]) -> None:
        """The next epoch starts at the position; after the end of an epoch it starts afresh.

        Raises:
            ValueError: the position lies within an epoch that was read in global batches of another size.
        """
        random = RandomState.from_dict(position["random"])
        if position["consumed"]:
            self.sharding.require_same_batches(position.get(GLOBAL_BATCH, self.items_per_batch), self.items_per_batch)
            self._resume = random, position["consumed"]
        elif self.generator is not None and random.own_state is not None:
            self.generator.set_state(random.own_state)


def length_of(loader: Any) -> int | None:
    """The number of batches of a loader or sampler, None where it does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def checksum(value: object) -> int:
    """A small number that differs where values differ; what has no plain bytes counts by its type."""
    leaves, structure = pytree.tree_flatten(value)
    return zlib.crc32(b"".join(map(_bytes_of, leaves)), zlib.crc32(str(structure).encode())) + 1


def _bytes_of(leaf: object) -> bytes:
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
        return leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, (bool, int, float, complex, str, bytes, np.ndarray, np.generic)):
        return pickle.dumps(leaf)
    return type(leaf).__name__.encode()
