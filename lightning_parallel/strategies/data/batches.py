"""Agreement of ranks on the batches they read: the same kind, the same number, and how much each counts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_parallel.strategies.checkpoint.saver import Saver
from lightning_parallel.strategies.data.loaders import DividedIterable
from lightning_parallel.strategies.data.randomness import RandomState, generators_of
from lightning_parallel.strategies.data.samplers import length_of
from lightning_parallel.strategies.data.shares import PassNotes, Readers
from lightning_parallel.strategies.ranks.agreement import (
    EVENLY,
    GIVEN,
    NOTHING,
    Comparison,
    Content,
    Mark,
    describe,
    gather_objects,
    require_same,
)
from lightning_parallel.strategies.ranks.signals import Requested, Signals
from lightning_parallel.strategies.trainer import lightnings
from lightning_parallel.techniques.tools.microbatches import NO_DIMS, Dims, samples_in
from lightning_parallel.values import outline_of

ENDED: Mark = (-1, -1, 0, 0)
BEGINS: Mark = (-5, 0, 0, 0)
LEAVES: Mark = (-6, 0, 0, 0)
LOADERS = -8


class Batches:
    """Watches the batches of one run on all ranks at once.

    Args:
        readers: the ranks that read different samples.
        group: all ranks, for messages of the host.
        signals: what was asked of this process; none before the run has begun.
        saver: knows whether a save in the background has failed.
        settings: the numbers by which optimizers step at the moment.
    """

    def __init__(
        self,
        readers: Readers,
        group: dist.ProcessGroup,
        signals: Callable[[], Signals | None],
        saver: Saver,
        settings: Callable[[], list[Any]],
    ) -> None:
        self.readers = readers
        self._group = group
        self._signals, self._saver = signals, saver
        self._uncounted: list[int] = []
        self._outline: Any = None  # of the batch before, and the checksum of its structure
        self._structure = 0
        self._find_settings, self._settings, self._checksum = settings, list[Any](), 0
        #: where a plan says that samples are, see `ParallelPlan.batch_dims`
        self.batch_dims: Dims = NO_DIMS
        #: how much this rank's batch counts against the others' on average; 0.0 for one that does not count
        self.weight = 1.0
        #: the least number of samples that any rank has of this batch
        self.fewest_samples: int | None = None

    def compare_loaders(self, name: str, number: int | str) -> None:
        """Loaders are about to be registered, or to be asked for, on all ranks as many.

        Args:
            name: Lightning's for them, as "val_dataloader".
            number: how many this rank has, or words for it.

        Raises:
            ValueError: on every rank, if others have another number, or are at another place.
        """
        mark, content = (LOADERS, zlib.crc32(f"{name}: {number}".encode()), 0, 0), self._nothing_read()
        Comparison(mark, NOTHING, self._group, content).finish(lambda: f"{GIVEN}{name}: {number}", str)

    def register(self, loader: Any) -> None:
        """A loader is about to be used.

        Raises:
            ValueError: on every rank, if its length differs between ranks.
        """
        lengths = gather_objects(length_of(loader), self._group)
        require_same(f"the number of batches of {type(loader).__name__}", lengths, EVENLY)
        self._share_generators([loader])

    def begin_pass(self, combined: Any) -> None:
        """Loaders are about to be iterated over: what draws their order stands alike on all ranks.

        Raises:
            ValueError: on every rank, if others are at another place.
        """
        self._stand(BEGINS, "a pass over the data begins")
        self._share_generators(combined.flattened)

    def leave(self) -> None:
        """Training is over.

        Raises:
            ValueError: on every rank, if it goes on for others.
        """
        self._stand(LEAVES, "training is over")

    def begin(self, combined: Any, batch: Any, batch_idx: int, dataloader_idx: int, is_last: bool) -> None:
        """A batch is about to be used.

        Raises:
            ValueError: on every rank, if the kinds of batches differ, or one rank ends before the others.
            SIGTERMException: on every rank, if one was asked to stop; KeyboardInterrupt if it was by SIGINT.
            Exception: on every rank, if a checkpoint could not be saved while training went on.
        """
        loaders = [combined.flattened[dataloader_idx]] if lightnings.reads_in_turn(combined) else combined.flattened
        last = is_last and any(length_of(loader) is None for loader in loaders)
        readings = _readings(combined, loaders, dataloader_idx)
        content = None if self.readers.copies == 1 else self._content(readings, batch_idx)
        self._agree((dataloader_idx, batch_idx, int(last)), batch, content)
        if batch_idx == 0:
            self._require_same_order(loaders, readings)
        self.weight = self._weight_of(readings, batch_idx)
        if self.weight == 0.0:
            self._uncounted.append(dataloader_idx)

    def end(self) -> None:
        """All loaders have been read."""
        self.weight = 1.0
        self._stand(ENDED, "none is left")

    def drop_uncounted_predictions(self, loop: Any) -> None:
        """Removes what a prediction loop keeps for samples that do not count; they come last."""
        for dataloader_idx in self._uncounted:
            for kept in lightnings.kept_predictions(loop, dataloader_idx):
                if kept:
                    kept.pop()
        self._uncounted.clear()

    def _stand(self, mark: Mark, place: str) -> None:
        self._compare(mark, lambda: place, str, self._nothing_read())

    def _nothing_read(self) -> Content | None:
        return None if self.readers.copies == 1 else self._content([], 0)

    def _content(self, readings: Sequence[Any], batch_idx: int) -> Content:
        found = [(_notes(reading) or PassNotes()).contents.pop(batch_idx, None) for reading in readings]
        known = [checksum for checksum in found if checksum is not None]
        return Content(self.readers.ranks, self.readers.rank, zlib.crc32(repr(known).encode()) if known else None)

    def _agree(self, position: tuple[int, int, int], batch: Any, content: Content | None) -> None:
        dataloader_idx, batch_idx, last = position
        outline = outline_of(batch)
        if outline is None or outline != self._outline:  # most batches are like the one before
            self._outline, self._structure = outline, zlib.crc32(describe(batch).encode())

        def place() -> str:
            return f"{_name(batch_idx, dataloader_idx)}{', the last one' if last else ''}"

        if (settings := self._find_settings()) != self._settings:
            self._settings, numbers = settings, pytree.tree_map_only(Tensor, float, settings)
            self._checksum = zlib.crc32(repr(numbers).encode())
        mark, samples = (*position, self._structure ^ self._checksum), samples_in(batch, self.batch_dims) or 1
        self.fewest_samples = self._compare(mark, place, lambda: describe(batch), content, samples)

    def _compare(
        self,
        mark: Mark,
        place: Callable[[], str],
        structure: Callable[[], str],
        content: Content | None,
        samples: int = 0,
    ) -> int:
        """One small message in every batch; ranks say more only once they know that they differ.

        Returns:
            The least number of samples that any rank has.
        """
        signals = self._signals()
        requested = Requested() if signals is None else signals.requested
        comparison = Comparison(mark, (*requested, self._saver.failed), self._group, content, samples)
        comparison.finish(place, structure, lambda: str(self._settings))
        stop, requeue, failed = comparison.anybody
        if failed:
            self._saver.fail()
        if signals is not None and (stop or requeue):
            signals.answer(Requested(int(stop), bool(requeue)))
        return comparison.fewest

    def _require_same_order(self, loaders: Sequence[Any], readings: Sequence[Any]) -> None:
        remedy = "if it divides itself by rank, pass Trainer(use_distributed_sampler=False)"
        for loader, reading in zip(loaders, readings, strict=True):
            dataset, notes = getattr(loader, "dataset", None), _notes(reading)
            if isinstance(dataset, DividedIterable):
                what, value = f"the stream of {type(dataset.dataset).__name__}", str(dataset.fingerprints.tolist())
                require_same(what, gather_objects(value, self._group), remedy)
            elif notes is not None and notes.order:
                what = f"the order of the samples that {type(loader.divided.source).__name__} yields"
                require_same(what, gather_objects(f"checksum {notes.order}", self._group), remedy)

    def _weight_of(self, readings: Sequence[Any], batch_idx: int) -> float:
        uneven = [notes.uneven[batch_idx] for each in readings if (notes := _notes(each)) and batch_idx in notes.uneven]
        if not uneven:
            return 1.0
        if len(readings) > 1:
            raise ValueError(
                f"one of {len(readings)} loaders read together ends with {uneven[0].total} samples, which "
                f"{self.readers.ranks} ranks cannot share evenly; give it drop_last=True"
            )
        return uneven[0].weight(self.readers.ranks)

    def _share_generators(self, loaders: Sequence[Any]) -> None:
        """The host's generators, and those that users gave their loaders, continue from where they stand on rank 0."""
        owned = (generators_of(loader) for loader in loaders)
        generators = list({id(generator): generator for some in owned for generator in some}.values())
        states = [(RandomState.now(), [generator.get_state() for generator in generators])]
        dist.broadcast_object_list(states, 0, group=self._group)
        host, own = states[0]
        host.restore()
        for generator, state in zip(generators, own, strict=True):
            generator.set_state(state)


def _readings(combined: Any, loaders: Sequence[Any], dataloader_idx: int) -> list[Any]:
    """The passes that Lightning is at, though others may have been started meanwhile to look at a batch."""
    iterators = lightnings.iterators_of(combined, dataloader_idx)
    return [getattr(loaders[0], "latest", None)] if iterators is None else iterators


def _name(batch_idx: int, dataloader_idx: int) -> str:
    return f"batch {batch_idx} of loader {dataloader_idx}"


def _notes(reading: Any) -> PassNotes | None:
    return getattr(reading, "notes", None)
