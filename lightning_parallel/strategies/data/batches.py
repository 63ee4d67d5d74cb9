"""Agreement of ranks on the batches that they read: the same kind, the same number, and how much each counts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies.data.first_batch import FirstPass
from lightning_parallel.strategies.data.loaders import DividedIterable, DividedIterator, DividedLoader
from lightning_parallel.strategies.data.randomness import RandomState, generators_of
from lightning_parallel.strategies.data.samplers import length_of
from lightning_parallel.strategies.data.sharding import DataSharding, PassNotes, Reading, is_compared
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
        sharding: of the data.
        group: all ranks, for messages of the host.
        signals: returns what was asked of this process; None before the run has begun.
        saves: those in the background.
        settings: returns the numbers by which optimizers step at the moment.

    Attributes:
        weight: the factor by which this rank's batch counts in the mean over ranks; 0.0 for one that does not count.
        fewest_samples: the least number of samples that any rank has of this batch.
        first_pass: of loaders whose first batch was read before the loop read it.
        batch_dims: where a plan says that samples are, see `ParallelPlan.batch_dims`.
    """

    def __init__(
        self,
        sharding: DataSharding,
        group: dist.ProcessGroup,
        signals: Callable[[], Signals | None],
        saves: BackgroundSaves,
        settings: Callable[[], list[Any]],
    ) -> None:
        self.sharding, self._group = sharding, group
        self._signals, self._saves, self._find_settings = signals, saves, settings
        self._uncounted: list[int] = []
        self._outline: Any = None  # of the batch before, and the checksum of its structure
        self._structure = 0
        self._settings, self._settings_checksum = list[Any](), 0
        self.first_pass: FirstPass | None = None
        self.batch_dims: Dims = NO_DIMS
        self.weight = 1.0
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
        loaders = [combined.flattened[dataloader_idx]] if internals.reads_in_turn(combined) else combined.flattened
        last = is_last and any(length_of(loader) is None for loader in loaders)
        place = f"batch {batch_idx} of loader {dataloader_idx}"
        outline = outline_of(batch)
        if outline is None or outline != self._outline:  # most batches are like the one before
            self._outline, self._structure = outline, zlib.crc32(describe(batch).encode())
        self._read_settings()
        words = f"{place}, the last one" if last else place
        reply = self._exchange(
            SyncPoint.BATCH,
            lambda: Words(words, describe(batch), str(self._settings)),
            loader=dataloader_idx,
            batch=batch_idx,
            is_last=last,
            checksum=self._structure ^ self._settings_checksum,
            samples=samples_in(batch, self.batch_dims) or 1,
        )
        self.fewest_samples = reply.fewest_samples
        passes = [
            (notes, notes.number_of(batch_idx) if notes else 0) for notes in _passes(combined, loaders, dataloader_idx)
        ]
        if self.sharding.copies > 1 and is_compared(batch_idx):
            found = [notes.contents.pop(number, None) for notes, number in passes if notes]
            content = zlib.crc32(repr(found).encode()) if any(found) else None
            require_same_content(content, self.sharding.rank, self.sharding.ranks, place, self._group)
        for loader, (notes, _) in zip(loaders, passes, strict=True):
            self._require_same_order(loader, notes, batch_idx)
        self.weight = self._weight_of(passes)
        if self.weight == 0.0:
            self._uncounted.append(dataloader_idx)

    def end(self) -> None:
        """All loaders have been read."""
        self.weight = 1.0
        self._exchange(SyncPoint.PASS_ENDS)

    def drop_uncounted_predictions(self, loop: Any) -> None:
        """Remove what a prediction loop keeps for samples that do not count; they come last."""
        for dataloader_idx in self._uncounted:
            for kept in internals.kept_predictions(loop, dataloader_idx):
                if kept:
                    kept.pop()
        self._uncounted.clear()

    def share_generators(self, loaders: Sequence[Any]) -> None:
        """Set the host's generators, and those that users gave their loaders, to rank 0's. Collective."""
        generators = list({id(each): each for loader in loaders for each in generators_of(loader)}.values())
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
            self._settings_checksum = zlib.crc32(repr(numbers).encode())

    def _require_same_order(self, loader: Any, notes: PassNotes | None, batch_idx: int) -> None:
        """Compare the first sample of each worker's stream at its first batch, or the order of a sampler at batch 0."""
        dataset = loader.dataset if isinstance(loader, DividedLoader) else None
        if isinstance(dataset, DividedIterable) and batch_idx < len(dataset.first_samples):
            what = f"the stream of {type(dataset.dataset).__name__}"
            # compared first at batch 0, so that from then on ranks have equally many workers
            value = f"checksum {int(dataset.first_samples[batch_idx])}, {len(dataset.first_samples)} workers"
        elif batch_idx == 0 and notes is not None and notes.order:
            what = f"the order of the samples that {type(loader.divided.source).__name__} yields"
            value = f"checksum {notes.order}"
        else:
            return
        remedy = "if it divides itself by rank, pass Trainer(use_distributed_sampler=False)"
        require_same(what, gather_objects(value, self._group), remedy)

    def _weight_of(self, passes: Sequence[tuple[PassNotes | None, int]]) -> float:
        uneven = [notes.uneven[number] for notes, number in passes if notes and number in notes.uneven]
        if not uneven:
            return 1.0
        if len(passes) > 1:
            raise ValueError(
                f"one of {len(passes)} loaders read together ends with {uneven[0].total} samples, which "
                f"{self.sharding.ranks} ranks cannot share evenly; give it drop_last=True"
            )
        return uneven[0].weight(self.sharding.ranks)


def _passes(combined: Any, loaders: Sequence[Any], dataloader_idx: int) -> list[PassNotes | None]:
    """Notes of the passes that Lightning is at, though others may have begun meanwhile; None of undivided loaders."""
    iterators = internals.iterators_of(combined, dataloader_idx)
    if iterators is None:  # Lightning fetched ahead, and is at the next loader
        return [loaders[0].latest if isinstance(loaders[0], (DividedLoader, DividedIterator)) else None]
    return [each.notes if isinstance(each, Reading) else None for each in iterators]
