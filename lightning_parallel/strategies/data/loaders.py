"""Dividing data: ranks that hold different samples read disjoint parts of what one device would read, in its order.

Global batch i of n ranks is what one device with n times the batch size would see as its batch i: the user's own
sampler and order are kept. Where samples do not divide, ranks get parts of unequal size, and a rank for which nothing
is left gets a sample that does not count. `Share` says how much a part counts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from lightning_parallel.strategies.data.divided_loaders import (
    CollateCounted,
    Counted,
    DividedLoader,
    ResumableLoader,
    StatefulStream,
    outlives_epochs,
)
from lightning_parallel.strategies.data.samplers import (
    DealtBatches,
    DividedBatches,
    DividedSampler,
    checksum,
)
from lightning_parallel.strategies.data.shares import Pass, PassNotes, Readers, Reading
from lightning_parallel.strategies.trainer import lightnings
from lightning_parallel.values import batch_size

T = TypeVar("T")


class DividedIterable(IterableDataset[Any]):
    """An iterable dataset of which this rank (in each loader worker) yields its part of every global batch."""

    def __init__(self, dataset: Any, readers: Readers, batch_size: int, drop_last: bool, workers: int) -> None:
        self.dataset = dataset
        self.readers, self.batch_size, self.drop_last = readers, batch_size, drop_last
        #: checksum of the first sample that each worker saw, to find datasets that already differ between ranks
        self.fingerprints: Tensor = torch.zeros(max(1, workers), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        down, up = len(self.dataset) // self.readers.ranks, -(-len(self.dataset) // self.readers.ranks)
        return down if self.drop_last else up

    def __iter__(self) -> Iterator[Any]:
        samples = self._noting_the_first(iter(self.dataset))
        size = self.batch_size * self.readers.ranks
        while batch := list(islice(samples, size)):
            if len(batch) == size:
                yield from batch[self.readers.rank * self.batch_size : (self.readers.rank + 1) * self.batch_size]
            elif not self.drop_last:
                part, share = self.readers.part(batch)
                yield from (Counted(sample, share) for sample in part)

    def _noting_the_first(self, samples: Iterator[T]) -> Iterator[T]:
        worker = get_worker_info()
        for number, sample in enumerate(samples):
            if number == 0:
                self.fingerprints[worker.id if worker else 0] = checksum(sample)
            yield sample


def content_of(batch: Any) -> int:
    """A small number that tells batches apart, from a few thousand elements of each of its tensors."""

    def some(leaf: Any) -> Any:
        return leaf.reshape(-1)[:: leaf.numel() // 4096 + 1] if isinstance(leaf, Tensor) and leaf.numel() else leaf

    return checksum(pytree.tree_map(some, batch))


def _content_for(readers: Readers) -> Callable[[Any], int] | None:
    return content_of if readers.copies > 1 else None


class DividedIterator(Iterable[Any]):
    """Batches that are no DataLoader's, dealt to the ranks in turn."""

    def __init__(self, batches: Any, readers: Readers) -> None:
        self.batches, self.readers = batches, readers
        self.undivided = batches
        self.latest: Pass | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __iter__(self) -> Iterator[Any]:
        notes = PassNotes()
        reading = Reading(self._parts(notes), lambda: notes, _content_for(self.readers))
        self.latest = reading.known
        return reading

    def _parts(self, notes: PassNotes) -> Iterator[Any]:
        batches = iter(self.batches)
        for number, dealt in enumerate(iter(lambda: list(islice(batches, self.readers.ranks)), [])):
            batch, share = self.readers.turn(dealt, [batch_size(batch) or 1 for batch in dealt])
            notes.note(number, share, self.readers.ranks)
            yield batch


class SizedDividedIterator(DividedIterator):
    """A `DividedIterator` over batches that have a length."""

    def __len__(self) -> int:
        return -(-len(self.batches) // self.readers.ranks)


def resume(loop: Any) -> None:
    """Loaders of a fit loop that were made before a checkpoint told where they stood go on from there.

    They are made so early where something looks at data while the model is divided, or counts the steps to come.
    """
    if loop.is_resuming and lightnings.combined_of(loop) is not None:
        outlives = any(map(outlives_epochs, lightnings.loader_states(loop)))
        lightnings.restart_loaders(loop, loop.restarting or outlives)


def divide(loader: Any, readers: Readers, batches_done: Callable[[], int]) -> Any:
    """Makes of anything that Lightning accepts as a loader one that yields this rank's part.

    Raises:
        ValueError: a DistributedSampler that the user set up for other ranks than those that read different samples.
    """
    loader = undivided(loader)  # a CombinedLoader of the user's keeps what was put into it
    if not isinstance(loader, DataLoader):
        kind = SizedDividedIterator if isinstance(loader, Sized) else DividedIterator
        return kind(loader, readers) if readers.ranks * readers.copies > 1 else loader
    if (own := _own_distributed_sampler(loader)) is not None:
        _check(own, readers)
        return compared(loader, readers)
    if isinstance(loader.dataset, IterableDataset):
        alone = readers.ranks * readers.copies == 1 and not _has_state(loader)
        return loader if alone else _divide_iterable(loader, readers, batches_done)
    return _divide_map(loader, readers, batches_done)


def compared(loader: Any, readers: Readers) -> Any:
    """A loader that nobody divides, or a copy of it whose batches are compared among ranks that must read the same."""
    if readers.copies == 1:
        return loader
    loader = undivided(loader)
    if isinstance(loader, DataLoader):
        return _copy_of(loader, DividedLoader, {"divided": None, "content": content_of})
    kind = SizedDividedIterator if isinstance(loader, Sized) else DividedIterator
    return kind(loader, replace(readers, ranks=1, rank=0))


def undivided(loader: Any) -> Any:
    """The user's own loader."""
    return loader.undivided if isinstance(loader, (DividedLoader, DividedIterator)) else loader


def _divide_map(loader: DataLoader[Any], readers: Readers, batches_done: Callable[[], int]) -> Any:
    batch_sampler, remembers_indices = lightnings.own_batch_sampler(loader.batch_sampler)
    divided: DividedSampler
    if batch_sampler is None:
        divided = DealtBatches(loader.sampler, readers)
    elif type(batch_sampler) is BatchSampler or _is_torchdata(type(batch_sampler)):
        divided = DividedBatches(batch_sampler.sampler, readers, batch_sampler.batch_size, batch_sampler.drop_last)
    else:
        divided = DealtBatches(batch_sampler, readers)
    shown: Any = lightnings.remembering_indices(divided) if remembers_indices else divided
    place = "sampler" if batch_sampler is None else "batch_sampler"
    is_torchdata = any(map(_is_torchdata, type(loader).__mro__))
    if is_torchdata and vars(loader).get("next_iter_state") is not None:
        raise ValueError(
            f"a {type(loader).__name__} was given a state by load_state_dict, but a loader that is divided among ranks "
            "goes on from the trainer's checkpoint; leave load_state_dict out and pass ckpt_path to fit"
        )
    has_own_state = _has_state(loader) and not is_torchdata
    changes = {place: shown, "divided": divided, "batches_done": batches_done, "content": _content_for(readers)}
    return _copy_of(loader, DividedLoader if has_own_state else ResumableLoader, changes)


def _is_torchdata(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torchdata"


def _has_state(loader: DataLoader[Any]) -> bool:
    return callable(getattr(loader, "state_dict", None))


def _divide_iterable(loader: DataLoader[Any], readers: Readers, batches_done: Callable[[], int]) -> Any:
    size = 1 if loader.batch_size is None else loader.batch_size
    dataset = DividedIterable(loader.dataset, readers, size, bool(loader.drop_last), loader.num_workers)
    changes = {
        "dataset": dataset,
        "collate_fn": CollateCounted(loader.collate_fn),
        "divided": None,
        "content": _content_for(readers),
        "readers": readers,
        "batches_done": batches_done,
    }
    return _copy_of(loader, StatefulStream if _has_state(loader) else DividedLoader, changes)


def _copy_of(loader: DataLoader[Any], kind: type[DividedLoader], changes: dict[str, Any]) -> Any:
    """A copy of the user's loader, whatever its class and however it was made, with a few attributes changed."""
    divided = copy.copy(loader)
    own = type(loader)
    divided.__class__ = kind if own is DataLoader else type(f"Divided{own.__name__}", (kind, own), {})
    vars(divided).update(changes, undivided=loader, _iterator=None)
    return divided


def _own_distributed_sampler(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return next((sampler for sampler in samplers if isinstance(sampler, DistributedSampler)), None)


def _check(sampler: DistributedSampler[Any], readers: Readers) -> None:
    if (sampler.num_replicas, sampler.rank) != (readers.ranks, readers.rank):
        raise ValueError(
            f"your DistributedSampler reads part {sampler.rank} of {sampler.num_replicas}, but this rank reads part "
            f"{readers.rank} of {readers.ranks}; leave the sampler out (data is divided for you) or build it from "
            "trainer.distributed_sampler_kwargs"
        )
