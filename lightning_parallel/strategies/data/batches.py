"""Agreement of ranks on the batches that they read: the same kind, the same number, and how much each counts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from lightning_parallel.strategies.data.first_batch import FirstPass
from lightning_parallel.strategies.data.loaders import DividedIterable
from lightning_parallel.strategies.data.randomness import RandomState, generators_of
from lightning_parallel.strategies.data.samplers import length_of
from lightning_parallel.strategies.data.shares import PassNotes, Readers, is_compared
from lightning_parallel.strategies.ranks.agreement import describe, gather_objects, require_same
from lightning_parallel.strategies.ranks.signals import Signals
from lightning_parallel.strategies.ranks.sync import (
    EVENLY,
    Exchange,
    Message,
    Reply,
    SyncPoint,
    Words,
    require_same_content,
)
from lightning_parallel.strategies.trainer import lightnings
from lightning_parallel.techniques.tools.microbatches import NO_DIMS, Dims, samples_in
from lightning_parallel.values import outline_of

PLACES = {
    SyncPoint.PASS_BEGINS: "a pass over the data begins",
    SyncPoint.PASS_ENDS: "none is left",
    SyncPoint.TRAINING_ENDS: "training is over",
}


class BackgroundSaves(Protocol):
    """Saves that go on while training does."""

    @property
    def failed(self) -> bool:
        """Whether one has failed on this rank."""

    def fail(self) -> None:
        """Raise on this rank, too, what another one failed by."""


class Batches:
    """Follows the batches of one run on all ranks at once.

    Args:
        readers: the ranks that read different samples.
        group: all ranks, for messages of the host.
        signals: returns what was asked of this process; None before the run has begun.
        saves: those in the background.
        settings: returns the numbers by which optimizers step at the moment.
    """

    def __init__(
        self,
        readers: Readers,
        group: dist.ProcessGroup,
        signals: Callable[[], Signals | None],
        saves: BackgroundSaves,
        settings: Callable[[], list[Any]],
    ) -> None:
        self.readers, self._group = readers, group
        self._signals, self._saves = signals, saves
        self._uncounted: list[int] = []
        self._outline: Any = None  # of the batch before, and the checksum of its structure
        self._structure = 0
        self._find_settings, self._settings, self._checksum = settings, list[Any](), 0
        #: of loaders whose first batch was read before the loop read it
        self.first_pass: FirstPass | None = None
        #: where a plan says that samples are, see `ParallelPlan.batch_dims`
        self.batch_dims: Dims = NO_DIMS
        #: the factor by which this rank's batch counts in the mean over ranks; 0.0 for one that does not count
        self.weight = 1.0
        #: the least number of samples that any rank has of this batch
        self.fewest_samples: int | None = None

    def compare_loaders(self, name: str, number: int | str) -> None:
        """Raise on every rank if ranks are about to get different numbers of loaders. Collective over all ranks.

        Args:
            name: Lightning's for them, as "val_dataloader".
            number: how many this rank has, or words for it.
        """
        place = f"{name}: {number}"
        message = Message(SyncPoint.LOADERS, checksum=zlib.crc32(place.encode()))
        Exchange(message, self._group).wait(lambda: Words(f"loaders of {place}"))

    def register(self, loader: Any) -> None:
        """Raise on every rank if a loader's length differs between ranks. Collective over all ranks."""
        lengths = gather_objects(length_of(loader), self._group)
        require_same(f"the number of batches of {type(loader).__name__}", lengths, EVENLY)
        self.share_generators([loader])

    def begin_pass(self, combined: Any) -> None:
        """Let what draws the order of loaders stand alike on all ranks before they are iterated over."""
        self._exchange(SyncPoint.PASS_BEGINS)
        self.share_generators(combined.flattened)
        if self.first_pass is not None and self.first_pass.reads(combined):
            self.first_pass.begin()
            self.first_pass = None

    def leave(self) -> None:
        """Raise on every rank if training is over here and goes on for others."""
        self._exchange(SyncPoint.TRAINING_ENDS)

    def begin(self, combined: Any, batch: Any, batch_idx: int, dataloader_idx: int, is_last: bool) -> None:
        """Agree on a batch that is about to be used. Collective over all ranks.

        Raises:
            ValueError: on every rank, if the kinds of batches differ, or one rank ends before the others.
            SIGTERMException: on every rank, if one was asked to stop; KeyboardInterrupt if it was by SIGINT.
            Exception: on every rank, if a checkpoint could not be saved while training went on.
        """
        loaders = [combined.flattened[dataloader_idx]] if lightnings.reads_in_turn(combined) else combined.flattened
        last = is_last and any(length_of(loader) is None for loader in loaders)
        place = f"batch {batch_idx} of loader {dataloader_idx}"
        outline = outline_of(batch)
        if outline is None or outline != self._outline:  # most batches are like the one before
            self._outline, self._structure = outline, zlib.crc32(describe(batch).encode())
        self._read_settings()
        checksum, samples = self._structure ^ self._checksum, samples_in(batch, self.batch_dims) or 1
        said = f"{place}, the last one" if last else place
        reply = self._exchange(
            SyncPoint.BATCH,
            lambda: Words(said, describe(batch), str(self._settings)),
            loader=dataloader_idx,
            batch=batch_idx,
            is_last=last,
            checksum=checksum,
            samples=samples,
        )
        self.fewest_samples = reply.fewest_samples
        readings = _readings(combined, loaders, dataloader_idx)
        if self.readers.copies > 1 and is_compared(batch_idx):
            found = [(_notes(reading) or PassNotes()).contents.pop(batch_idx, None) for reading in readings]
            known = [each for each in found if each is not None]
            content = zlib.crc32(repr(known).encode()) if known else None
            require_same_content(content, self.readers.rank, self.readers.ranks, place, self._group)
        if batch_idx == 0:
            self._require_same_order(loaders, readings)
        self.weight = self._weight_of(readings, batch_idx)
        if self.weight == 0.0:
            self._uncounted.append(dataloader_idx)

    def end(self) -> None:
        """All loaders have been read."""
        self.weight = 1.0
        self._exchange(SyncPoint.PASS_ENDS)

    def drop_uncounted_predictions(self, loop: Any) -> None:
        """Remove what a prediction loop keeps for samples that do not count; they come last."""
        for dataloader_idx in self._uncounted:
            for kept in lightnings.kept_predictions(loop, dataloader_idx):
                if kept:
                    kept.pop()
        self._uncounted.clear()

    def share_generators(self, loaders: Sequence[Any]) -> None:
        """Set the host's generators, and those that users gave their loaders, to rank 0's. Collective."""
        owned = (generators_of(loader) for loader in loaders)
        generators = list({id(generator): generator for some in owned for generator in some}.values())
        states = [(RandomState.now(), [generator.get_state() for generator in generators])]
        dist.broadcast_object_list(states, 0, group=self._group)
        host, own = states[0]
        host.restore()
        for generator, state in zip(generators, own, strict=True):
            generator.set_state(state)

    def _exchange(self, point: SyncPoint, describe: Callable[[], Words] | None = None, **numbers: int) -> Reply:
        """Send one small message; ranks say more only once they know that they differ."""
        signals = self._signals()
        stop, requeue = (0, False) if signals is None else (signals.stop, signals.requeue)
        message = Message(point, **numbers, stop=stop, requeue=requeue, save_failed=self._saves.failed)  # type: ignore[arg-type]
        reply = Exchange(message, self._group).wait(describe or (lambda: Words(PLACES[point])))
        if reply.save_failed:
            self._saves.fail()
        if signals is not None and (reply.stop or reply.requeue):
            signals.answer(reply.stop, reply.requeue)
        return reply

    def _read_settings(self) -> None:
        """Update the checksum of learning rates and the like. A GPU's tensor is read only once it has changed."""
        found, settings = self._find_settings(), list[Any]()
        for value in found:
            if isinstance(value, Tensor):
                settings.append(float(value) if value.device.type == "cpu" else (id(value), value._version))
            else:
                settings.append(value)
        if settings != self._settings:
            self._settings = settings
            numbers = [float(value) if isinstance(value, Tensor) else value for value in found]
            self._checksum = zlib.crc32(repr(numbers).encode())

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


def _readings(combined: Any, loaders: Sequence[Any], dataloader_idx: int) -> list[Any]:
    """The passes that Lightning is at, though others may have begun meanwhile."""
    iterators = lightnings.iterators_of(combined, dataloader_idx)
    return [getattr(loaders[0], "latest", None)] if iterators is None else iterators


def _notes(reading: Any) -> PassNotes | None:
    return getattr(reading, "notes", None)
