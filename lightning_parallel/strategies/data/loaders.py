"""Sharding of data: data-parallel ranks read disjoint parts of what one device would read, in the same order.

Global batch i of n ranks equals batch i of one device with n times the batch size: the user's sampler and order are
kept. If the samples of the last global batch cannot be divided evenly, ranks get batches of unequal size, and a rank
for which none is left gets a sample that does not count. `Share` says how much a rank's batch counts. For example, 21
samples in batches of 4 on 2 ranks: two global batches of 8, then one of 5, of which rank 0 gets 3 and rank 1 gets 2.
"""

from __future__ import annotations

import copy
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies.data.randomness import RandomState
from lightning_parallel.strategies.lightning_package import _IndexBatchSamplerWrapper
from lightning_parallel.techniques.tools.microbatches import samples_in

T = TypeVar("T")
CHECKED_FIRST, CHECKED_EVERY = 8, 64
GLOBAL_BATCH = "global_batch"
"""Key of a loader's saved position for the number of the sampler's items in one global batch."""


class Share(NamedTuple):
    """Size of a rank's part of a global batch: it reads `samples` of `total` samples."""

    samples: int
    total: int


@dataclass(frozen=True)
class DataSharding:
    """How data is sharded over ranks.

    Attributes:
        ranks: number of ranks that read different samples.
        rank: index of this rank among these.
        copies: number of ranks that read the same samples as this one, itself included.
    """

    ranks: int
    rank: int
    copies: int = 1

    def part(self, items: list[T]) -> tuple[list[T], Share]:
        """Return this rank's items of a global batch, as evenly as possible; if none is left, an uncounted one."""
        # 21 items on 4 ranks: 6, 5, 5, 5
        base, extra = divmod(len(items), self.ranks)
        start = self.rank * base + min(self.rank, extra)
        part = items[start : start + base + (self.rank < extra)]
        return part or items[:1], Share(len(part), len(items))

    def round_robin(self, batches: list[T], sizes: list[int]) -> tuple[T, Share]:
        """Return this rank's batch of one batch per rank; the first one, uncounted, if there is none for this rank."""
        # at the end of the data there may be fewer batches than ranks
        has_batch = self.rank < len(batches)
        return batches[self.rank if has_batch else 0], Share(sizes[self.rank] if has_batch else 0, sum(sizes))

    def require_same_batches(self, before: int, now: int) -> None:
        """Raise ValueError if a run would resume in the middle of an epoch with global batches of another size."""
        if now == before:
            return
        divisors = ", ".join(str(count) for count in range(1, before + 1) if before % count == 0)
        other = f"{before} is not divisible by {self.ranks}; make the number of data-parallel ranks one of {divisors}"
        fitting = f"use {before // self.ranks} per rank instead of {now // self.ranks}"
        raise ValueError(
            f"the checkpoint lies within an epoch that was read in global batches of {before}, but now one has {now} "
            f"({self.ranks} data-parallel ranks), so the loss curve would differ; "
            f"{other if before % self.ranks else fitting}, or resume from a checkpoint at the end of an epoch"
        )


def is_compared(batch_idx: int) -> bool:
    """Return whether ranks that must read the same samples compare this batch: the first 8, then every 64th."""
    return batch_idx < CHECKED_FIRST or batch_idx % CHECKED_EVERY == 0


@dataclass
class PassNotes:
    """Notes of one pass over a loader. They hold no reference to the iterator, so that its workers can exit.

    Attributes:
        uneven: the shares of batches that are divided unevenly, by the batch's index in this pass.
        length: number of batches of the epoch, once all have been read.
        order: checksum of the order of samples; 0 if there is none.
        contents: checksums of some batches, by index, if several ranks must read the same samples.
        begins_at: Lightning's index of the first batch, above 0 if a run resumes in the middle of an epoch.
    """

    uneven: dict[int, Share] = field(default_factory=dict)
    length: int | None = None
    order: int = 0
    contents: dict[int, int] = field(default_factory=dict)
    begins_at: int | None = None


class Reading(Iterator[Any]):
    """Iterator of one pass over a loader. Its notes stay valid when another pass begins, perhaps on one rank only.

    Args:
        batches: iterator of the loader's batches.
        notes: the notes of this pass.
        sharding: how the data is sharded.
        sampler: the loader's sampler, if any; its pass begins when the first batch is read.
    """

    def __init__(
        self, batches: Iterator[Any], notes: PassNotes, sharding: DataSharding, sampler: DividedSampler | None = None
    ) -> None:
        self.batches, self._sharding, self._sampler, self._number = batches, sharding, sampler, 0
        self.notes, self._peeked = notes, list[Any]()

    def peek(self) -> Any:
        """Return the next batch, which `next` will return again."""
        self._peeked.append(next(self))
        return self._peeked[0]

    def __next__(self) -> Any:
        if self._peeked:
            return self._peeked.pop()
        batch = next(self.batches)
        if isinstance(batch, SampleWithShare):
            self.notes.uneven[self._number] = batch.share
            batch = batch.value
        # reading the first batch has begun the sampler's pass, which has notes of its own
        if self._number == 0 and self._sampler is not None:
            self.notes.uneven, self.notes.order = self._sampler.latest.uneven, self._sampler.latest.order
        if self._sharding.copies > 1 and is_compared(self._number):
            self.notes.contents[self._number] = checksum(pytree.tree_map_only(Tensor, _some_of, batch))
        self._number += 1
        return batch


class DividedSampler(Sampler[Any]):
    """Sampler that yields this rank's part of the items of the user's sampler.

    It is resumable: the order is a function of the random state in which the user's sampler started, which is saved.
    It has no `state_dict`: torchdata's loaders would call that, and count the position a second time.

    Args:
        source: the user's sampler of single indices, or of batches, which the ranks take in turn.
        sharding: how the data is sharded.
        batch_size: number of samples in a rank's batch; None for a sampler of batches.
        drop_last: whether a last, incomplete global batch is left out.
    """

    def __init__(
        self, source: Any, sharding: DataSharding, batch_size: int | None = None, drop_last: bool = False
    ) -> None:
        self._deals = batch_size is None
        #: `sampler` is the one on which Lightning calls `set_epoch`, as on one device: `loader.batch_sampler.sampler`
        self.source, self.sampler = source, getattr(source, "sampler", None) if self._deals else source
        self.batch_size = getattr(source, "batch_size", None) if self._deals else batch_size
        self.drop_last = getattr(source, "drop_last", False) if self._deals else drop_last
        self._drops = not self._deals and drop_last
        #: number of items of the user's sampler in one global batch
        self.items_per_batch = (batch_size or 1) * sharding.ranks
        self.sharding, self.latest = sharding, PassNotes()
        #: random state in which the user's sampler began the present pass
        self.started_with: RandomState | None = None
        #: to resume: random state in which it begins the next pass, and how many of its items to skip
        self.resume: tuple[RandomState, int] | None = None

    @property
    def generator(self) -> torch.Generator | None:
        """The generator that the user passed to the sampler, if any."""
        candidates = (getattr(owner, "generator", None) for owner in (self.source, self.sampler))
        return next((generator for generator in candidates if isinstance(generator, torch.Generator)), None)

    def __iter__(self) -> Iterator[Any]:
        self.latest = PassNotes()
        return self._parts(self.latest)

    def _parts(self, notes: PassNotes) -> Iterator[Any]:
        if self.resume is None:
            self.started_with, consumed = RandomState.now(self.generator), 0
            items = iter(self.source)
        else:
            (self.started_with, consumed), self.resume = self.resume, None
            with self.started_with.replayed(self.generator):
                items = iter(self.source)
                for _ in islice(items, consumed):
                    pass
        first, number = consumed // self.items_per_batch, 0
        while batch := list(islice(items, self.items_per_batch)):
            if self._drops and len(batch) < self.items_per_batch:
                break
            if self._deals:
                sizes = [len(indices) if isinstance(indices, Sized) else 1 for indices in batch]
                part, share = self.sharding.round_robin(batch, sizes)
            else:
                part, share = self.sharding.part(batch)
            notes.order = notes.order or checksum(batch)
            if share.samples * self.sharding.ranks != share.total:
                notes.uneven[number] = share
            yield part
            number += 1
        notes.length = first + number

    def __len__(self) -> int:
        full, rest = divmod(len(self.source), self.items_per_batch)
        return full + (rest > 0 and not self._drops)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the user's sampler; Lightning calls this if the sampler yields batches."""
        if callable(set_epoch := getattr(self.source, "set_epoch", None)):
            set_epoch(epoch)


def length_of(loader: Any) -> int | None:
    """Return the number of batches of a loader or sampler; None if it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def checksum(value: object) -> int:
    """Return a checksum of a value, never 0; objects without plain bytes contribute their type only."""
    leaves, structure = pytree.tree_flatten(value)
    result = zlib.crc32(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(leaf, (bool, int, float, complex, str, bytes, np.ndarray, np.generic)):
            content = pickle.dumps(leaf)
        else:
            content = type(leaf).__name__.encode()
        result = zlib.crc32(content, result)
    return result + 1  # as 0 means that there is no checksum


def _some_of(tensor: Tensor) -> Tensor:
    """Return at most about 4096 elements of a tensor, evenly spaced."""
    return tensor.reshape(-1)[:: tensor.numel() // 4096 + 1] if tensor.numel() else tensor


# ---------------------------------------------------------------- streams


@dataclass(frozen=True)
class SampleWithShare:
    """Sample or batch of an iterable dataset that belongs to an uneven global batch."""

    value: Any
    share: Share


class CollateCounted:
    """Calls the user's `collate_fn`, and keeps the share of a batch whose samples are `SampleWithShare`."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:  # noqa: D102
        first = samples[0] if isinstance(samples, list) and samples else samples
        if not isinstance(first, SampleWithShare):
            return self.collate(samples)
        plain = [sample.value for sample in samples] if isinstance(samples, list) else samples.value
        return SampleWithShare(self.collate(plain), first.share)


class DividedIterable(IterableDataset[Any]):
    """Iterable dataset that yields this rank's part of every global batch, in each loader worker."""

    def __init__(self, dataset: Any, sharding: DataSharding, batch_size: int, drop_last: bool, workers: int) -> None:
        self.dataset = dataset
        self.sharding, self.batch_size, self.drop_last = sharding, batch_size, drop_last
        #: checksum of the first sample that each worker read, to detect datasets that already differ between ranks
        self.first_samples: Tensor = torch.zeros(max(1, workers), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        full, rest = divmod(len(self.dataset), self.sharding.ranks)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        samples, worker, first = iter(self.dataset), get_worker_info(), True
        size, start = self.batch_size * self.sharding.ranks, self.sharding.rank * self.batch_size
        while batch := list(islice(samples, size)):
            if first:
                first, self.first_samples[worker.id if worker else 0] = False, checksum(batch[0])
            if len(batch) == size:
                yield from batch[start : start + self.batch_size]
            elif not self.drop_last:
                part, share = self.sharding.part(batch)
                yield from (SampleWithShare(sample, share) for sample in part)


# ---------------------------------------------------------------- divided loaders


class DividedLoader(DataLoader[Any]):
    """Mixed into the class of the user's DataLoader: takes notes of each pass, such as the shares of uneven batches."""

    undivided: DataLoader[Any]
    divided: DividedSampler | None
    batches_done: Callable[[], int]
    sharding: DataSharding
    latest: PassNotes | None = None

    def __iter__(self) -> Any:
        self.latest = PassNotes()
        return Reading(super().__iter__(), self.latest, self.sharding, self.divided)


class ResumableLoader(DividedLoader):
    """Divided loader over a dataset with indices, whose position a checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch after the batches that have been trained."""
        sampler, batches = self.divided, self.batches_done()
        assert sampler is not None
        # the length of a sampler without `__len__` is known at the end of a pass
        length = sampler.latest.length if (known := length_of(sampler)) is None else known
        finished = length is not None and batches >= length
        started = None if finished else sampler.started_with
        consumed = 0 if finished else batches * sampler.items_per_batch
        random = (started or RandomState.now(sampler.generator)).as_dict()
        return {"consumed": consumed, "random": random, GLOBAL_BATCH: sampler.items_per_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next epoch at the saved position; at the beginning if the state is of the end of an epoch.

        Raises:
            ValueError: another class wrote the state, or it lies within an epoch of global batches of another size.
        """
        sampler = self.divided
        assert sampler is not None
        if "consumed" not in state:
            raise _other_state(state)
        random = RandomState.from_dict(state["random"])
        if state["consumed"]:
            self.sharding.require_same_batches(state[GLOBAL_BATCH], sampler.items_per_batch)
            sampler.resume = random, state["consumed"]
        elif sampler.generator is not None and random.own_state is not None:
            sampler.generator.set_state(random.own_state)


class StatefulStream(DividedLoader):
    """Divided loader over a stream, of a class that has a state of its own, such as torchdata's `StatefulDataLoader`.

    If a loader has no length, Lightning reads one batch ahead of the step. A checkpoint needs the state before that
    batch: the state after 2 batches if batch 2 has been trained and batch 3 has been read.
    """

    _states: Mapping[int, tuple[int, Any]] = {}  # by number of batches read: (batches into the epoch, loader's state)
    _resumes_after = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's own state after the trained batches, their number, and the size of a global batch."""
        done = self.batches_done()
        batches, state = self._states.get(done) or (done, self._own_state())
        return {"batches": batches, GLOBAL_BATCH: (self.batch_size or 1) * self.sharding.ranks, "own": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next epoch at the saved position.

        Raises:
            ValueError: another class wrote the state, or it is of global batches of another size.
        """
        if "own" not in state:
            raise _other_state(state)
        if state["batches"]:
            self.sharding.require_same_batches(state[GLOBAL_BATCH], (self.batch_size or 1) * self.sharding.ranks)
        self._resumes_after = state["batches"]
        super().load_state_dict(state["own"])  # type: ignore[misc]

    def _own_state(self) -> Any:
        return copy.deepcopy(super().state_dict())  # type: ignore[misc]

    def __iter__(self) -> Any:
        reading: Reading = super().__iter__()
        if length_of(self) is None:  # else Lightning reads no batch ahead
            reading.batches = self._noting_states(reading.batches)
        return reading

    def _noting_states(self, batches: Iterator[Any]) -> Iterator[Any]:
        done, self._resumes_after = self._resumes_after, 0
        self._states = {done: (done, self._own_state())}
        for batch in batches:
            done += 1
            self._states = {done - 1: self._states[done - 1], done: (done, self._own_state())}
            yield batch
        self._states = {**self._states, done: (0, self._own_state())}  # the epoch has ended


def _other_state(state: Mapping[str, Any]) -> ValueError:
    return ValueError(
        f"the checkpoint holds a loader's state from another strategy ({', '.join(state)}), but data divided among "
        "ranks resumes only from states of this one. Take a checkpoint from the end of an epoch and remove the state: "
        'checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader")'
    )


class DividedIterator(Iterable[Any]):
    """Iterable of batches that is no DataLoader; the ranks take its batches in turn."""

    def __init__(self, batches: Any, sharding: DataSharding) -> None:
        self.undivided, self.sharding = batches, sharding
        self.latest: PassNotes | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "undivided":
            raise AttributeError(name)
        return getattr(self.undivided, name)

    def __len__(self) -> int:
        return -(-len(self.undivided) // self.sharding.ranks)  # raises TypeError if there is no length

    def __iter__(self) -> Iterator[Any]:
        notes = self.latest = PassNotes()
        return Reading(self._parts(notes), notes, self.sharding)

    def _parts(self, notes: PassNotes) -> Iterator[Any]:
        batches, number = iter(self.undivided), 0
        while turn := list(islice(batches, self.sharding.ranks)):  # one batch for each rank
            batch, share = self.sharding.round_robin(turn, [samples_in(batch) or 1 for batch in turn])
            if share.samples * self.sharding.ranks != share.total:
                notes.uneven[number] = share
            yield batch
            number += 1


# ---------------------------------------------------------------- dividing


def divide(loader: Any, sharding: DataSharding, batches_done: Callable[[], int]) -> Any:
    """Return a loader that yields this rank's part of anything that Lightning accepts as a loader.

    Args:
        loader: the user's loader.
        sharding: how the data is sharded.
        batches_done: returns how many batches of the epoch have been trained.

    Raises:
        ValueError: the loader has a DistributedSampler with other `num_replicas` or `rank` than those of `sharding`, or
            a torchdata loader was given a state by the user.
    """
    loader = undivided(loader)  # a CombinedLoader of the user's may hold loaders that were divided before
    alone = sharding.ranks * sharding.copies == 1
    if not isinstance(loader, DataLoader):
        return loader if alone else DividedIterator(loader, sharding)
    # a DistributedSampler of the user's has divided the data already
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if not isinstance(sampler, DistributedSampler):
            continue
        if (sampler.num_replicas, sampler.rank) != (sharding.ranks, sharding.rank):
            raise ValueError(
                f"your DistributedSampler reads part {sampler.rank} of {sampler.num_replicas}, but this rank reads "
                f"part {sharding.rank} of {sharding.ranks}; leave the sampler out (data is divided for you) or "
                "build it from trainer.distributed_sampler_kwargs"
            )
        return compared(loader, sharding)
    changes: dict[str, Any] = {"divided": None, "batches_done": batches_done, "sharding": sharding}
    # e.g. torchdata's loaders, which are handled separately below
    has_state = callable(getattr(loader, "state_dict", None))
    is_torchdata = any(map(_is_torchdata, type(loader).__mro__))
    if isinstance(loader.dataset, IterableDataset):
        if alone and not has_state:
            return loader
        size = loader.batch_size or 1
        dataset = DividedIterable(loader.dataset, sharding, size, bool(loader.drop_last), loader.num_workers)
        changes |= {"dataset": dataset, "collate_fn": CollateCounted(loader.collate_fn)}
        return _copy_of(loader, StatefulStream if has_state else DividedLoader, changes)
    if is_torchdata and vars(loader).get("next_iter_state") is not None:
        raise ValueError(
            f"a {type(loader).__name__} was given a state by load_state_dict, but a loader that is divided among ranks "
            "resumes from the trainer's checkpoint; leave load_state_dict out and pass ckpt_path to fit"
        )
    batch_sampler: Any = loader.batch_sampler
    is_wrapped = isinstance(batch_sampler, _IndexBatchSamplerWrapper)  # by Lightning, to remember indices
    batch_sampler = batch_sampler._batch_sampler if is_wrapped else batch_sampler
    if batch_sampler is None:
        divided = DividedSampler(loader.sampler, sharding)
    elif type(batch_sampler) is BatchSampler or _is_torchdata(type(batch_sampler)):
        divided = DividedSampler(batch_sampler.sampler, sharding, batch_sampler.batch_size, batch_sampler.drop_last)
    else:
        divided = DividedSampler(batch_sampler, sharding)
    attribute = "sampler" if batch_sampler is None else "batch_sampler"
    changes[attribute] = _IndexBatchSamplerWrapper(divided) if is_wrapped else divided
    changes["divided"] = divided
    return _copy_of(loader, DividedLoader if has_state and not is_torchdata else ResumableLoader, changes)


def compared(loader: Any, sharding: DataSharding) -> Any:
    """Return a loader whose data is not divided here, as a copy that notes checksums if several ranks read the same."""
    if sharding.copies == 1:
        return loader
    loader = undivided(loader)
    if isinstance(loader, DataLoader):
        return _copy_of(loader, DividedLoader, {"divided": None, "sharding": sharding})
    return DividedIterator(loader, replace(sharding, ranks=1, rank=0))


def undivided(loader: Any) -> Any:
    """Return the user's loader."""
    return loader.undivided if isinstance(loader, (DividedLoader, DividedIterator)) else loader


def _copy_of(loader: DataLoader[Any], kind: type[DividedLoader], changes: dict[str, Any]) -> Any:
    """Return a copy of the user's loader, of any class and made in any way, with a few attributes changed."""
    divided = copy.copy(loader)
    base = type(loader)
    # a subclass of the user's class, so that its methods and isinstance checks still work
    divided.__class__ = kind if base is DataLoader else type(f"Divided{base.__name__}", (kind, base), {})
    vars(divided).update(changes, undivided=loader, _iterator=None)
    return divided


def _is_torchdata(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torchdata"


# ---------------------------------------------------------------- resuming from a checkpoint


def resume(loop: Any) -> None:
    """Restart loaders of a fit loop that were made before the checkpoint was read, so that they take up its position.

    They are made so early if a batch is read ahead of the run, or code asks for `estimated_stepping_batches`.
    """
    if not loop.is_resuming or internals.combined_of(loop) is None:
        return
    internals.restart_loaders(loop, loop.restarting or needs_epoch_end_state(loop))


def is_position(state: Any) -> bool:
    """Return whether the state of a loader is the position of one that was divided among ranks."""
    return isinstance(state, dict) and GLOBAL_BATCH in state


def needs_epoch_end_state(loop: Any) -> bool:
    """Return whether the next epoch depends on a loader's state at the end of an epoch: a stream's, or a generator's.

    Only states count that Lightning has not loaded from the checkpoint yet: it loads them only within an epoch.
    """
    unloaded: list[Any] = loop._combined_loader_states_to_load
    positions = filter(is_position, unloaded)
    return any("own" in state or state["random"]["own"] is not None for state in positions)
