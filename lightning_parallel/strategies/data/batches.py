"""Agreement of ranks on the batches that they read: the same kind, the same number, and how much each counts.

At each sync point every rank sends one message of the same length, so that ranks which are at different points compare
their messages with each other, and an error on all of them says where each one is. One all-reduce of some 20 numbers.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import IntEnum
from operator import neg
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.functional import highest
from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies.data.first_batch import FirstPass
from lightning_parallel.strategies.data.loaders import (
    DataSharding,
    DividedIterable,
    DividedIterator,
    DividedLoader,
    PassNotes,
    Reading,
    is_compared,
    length_of,
)
from lightning_parallel.strategies.data.randomness import RandomState, generators_of
from lightning_parallel.strategies.lightning_package import (
    BasePredictionWriter,
    Callback,
    LightningModule,
    ModelCheckpoint,
    Trainer,
)
from lightning_parallel.strategies.ranks.agreement import describe, gather_objects, require_same
from lightning_parallel.strategies.ranks.failures import Signals
from lightning_parallel.techniques.tools.microbatches import NO_DIMS, Dims, samples_in
from lightning_parallel.values import outline_of

log = logging.getLogger(__name__)


class SyncPoint(IntEnum):
    """A place at which all ranks exchange a message."""

    LOADERS = 1  #: loaders are about to be made or registered
    PASS_BEGINS = 2
    BATCH = 3
    STEP_BEGINS = 4  #: only where `on_train_batch_start` may end the epoch
    STEP_ENDS = 5
    STEP_WITHOUT_LOSS = 6
    BACKWARD = 7  #: within a step, by hand
    PASS_ENDS = 8
    TRAINING_ENDS = 9


class Message(NamedTuple):
    """What a rank sends to all others at a sync point. The first five must be the same on all of them."""

    point: SyncPoint
    loader: int = 0  #: the index of the batch's loader
    batch: int = 0  #: the index of the batch
    is_last: bool = False  #: whether it is the last batch of a loader that has no length
    checksum: int = 0  #: of all else that must be the same, as the structure of the batch
    samples: int = 0  #: that this rank has of the batch
    means: int = 0  #: the number of means that the step computed, in which ranks may differ
    learned_means: int = 0  #: of these, those that have gradients
    stop: int = 0  #: the signal that asked this process to stop, 0 if none has
    requeue: bool = False  #: whether SLURM asked to requeue
    save_failed: bool = False  #: whether a save in the background has failed


class Words(NamedTuple):
    """A message in words, made only where ranks differ."""

    place: str  #: "batch 3 of loader 0"
    structure: str = ""  #: of the batch
    settings: str = ""  #: the numbers by which optimizers step


class Exchange:
    """Sends this rank's message at once; `wait` returns what all say together. Collective over `group`, all ranks."""

    def __init__(self, message: Message, group: dist.ProcessGroup) -> None:
        self._point, self._group = message.point, group
        # [fields] and their negatives: one maximum tells the most and the least of all ranks
        numbers = np.array(message, dtype=np.float64)  # torch reads tuples four times as slowly
        self._numbers = torch.from_numpy(np.concatenate((numbers, -numbers)))
        self._work = highest(self._numbers, group)

    def wait(self, words: Words | Callable[[], Words]) -> tuple[Message, Message]:
        """Wait for all ranks, and return the highest and the lowest number of each field.

        Raises:
            ValueError: on every rank, if they are at different points or hold different things.
        """
        self._work.wait()
        numbers = self._numbers.tolist()
        most, least = Message(*numbers[: len(numbers) // 2]), Message(*map(neg, numbers[len(numbers) // 2 :]))
        if most[:5] != least[:5]:
            received = gather_objects((self._point, words if isinstance(words, Words) else words()), self._group)
            places, structures, settings = zip(*(words for _, words in received), strict=True)
            for point, (what, remedy) in RULES.items():
                if any(other == point for other, _ in received):
                    require_same(what, places, remedy)
            require_same("the end of the data", places, f"{EVENLY}, or set trainer.should_stop when all others do")
            require_same("the structure of a batch", structures, "look at the dataset there")
            remedy = "set them where all ranks come, such as on_train_batch_end, by what all of them have: "
            remedy += "trainer.callback_metrics, or self.all_gather(loss).mean()"
            require_same("learning rates, momenta and weight decays of optimizers", settings, remedy)
        return most, least


EVENLY = "every rank must read equally many batches"
RULES = {
    SyncPoint.LOADERS: (
        "which loaders are read next",
        "give every rank equally many loaders, to fit as by the hooks that return them",
    ),
    SyncPoint.STEP_WITHOUT_LOSS: (
        "whether a step returns a loss",
        "Lightning cannot skip a batch on several ranks: return a loss times zero",
    ),
    SyncPoint.STEP_ENDS: ("what is logged", "log on all ranks alike, or on one with rank_zero_only=True"),
    SyncPoint.BACKWARD: ("what ranks do next", "call self.manual_backward equally often on all ranks"),
    SyncPoint.STEP_BEGINS: (
        "whether an epoch goes on",
        "on_train_batch_start returns -1 on all ranks or on none: decide it by batch_idx, or by what all have",
    ),
}
"""Of a sync point at which only some ranks are, or with different checksums: what differs, and the remedy."""


PLACES = {
    SyncPoint.PASS_BEGINS: "a pass over the data begins",
    SyncPoint.PASS_ENDS: "none is left",
    SyncPoint.TRAINING_ENDS: "training is over",
}


class BackgroundSaves(Protocol):
    """Saves that go on while training does."""

    failed: bool  #: whether one has failed on this rank

    def wait(self) -> None:
        """Return when nothing is being saved; raise the failure of the last save."""


class Batches:
    """Follows the batches of one run on all ranks at once.

    Args:
        sharding: of the data.
        group: all ranks, for messages of the host.
        signals: notes what is asked of this process.
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
        signals: Signals,
        saves: BackgroundSaves,
        settings: Callable[[], list[Any]],
    ) -> None:
        self.sharding, self._group = sharding, group
        self._signals, self._saves, self._find_settings = signals, saves, settings
        self._known: Any = None  # the outline of the batch before, of which these are checksum and number of samples
        self._structure = self._samples = 0
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
        Exchange(message, self._group).wait(Words(f"loaders of {place}"))

    def register(self, loader: Any) -> None:
        """Raise on every rank if a loader's length differs between ranks. Collective over all ranks."""
        lengths = gather_objects(length_of(loader), self._group)
        require_same(f"the number of batches of {type(loader).__name__}", lengths, EVENLY)
        self.share_generators([loader])

    def begin_pass(self, combined: Any) -> None:
        """Let what draws the order of loaders stand alike on all ranks before they are iterated over."""
        self._exchange(SyncPoint.PASS_BEGINS)
        self.share_generators(combined.flattened)
        if self.first_pass is not None and self.first_pass.begin(combined):
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
        loaders, iterators = internals.reading_of(combined, dataloader_idx)
        last = is_last and any(length_of(loader) is None for loader in loaders)
        place = f"batch {batch_idx} of loader {dataloader_idx}"
        outline = outline_of(batch), self.batch_dims  # which a pipeline knows after its first batch
        if outline[0] is None or outline != self._known:  # most batches are like the one before
            self._known, self._structure = outline, zlib.crc32(describe(batch).encode())
            self._samples = samples_in(batch, self.batch_dims) or 1
        self._read_settings()
        words = f"{place}, the last one" if last else place
        _, least = self._exchange(
            SyncPoint.BATCH,
            lambda: Words(words, describe(batch), str(self._settings)),
            loader=dataloader_idx,
            batch=batch_idx,
            is_last=last,
            checksum=self._structure ^ self._settings_checksum,
            samples=self._samples,
        )
        self.fewest_samples = int(least.samples)
        passes = list[tuple[PassNotes | None, int]]()  # with the number of the batch in each; None if undivided
        for loader, iterator in zip(loaders, iterators or [None], strict=True):
            # others may have begun since Lightning made this iterator
            notes = iterator.notes if isinstance(iterator, Reading) else None
            if iterators is None and isinstance(loader, (DividedLoader, DividedIterator)):
                notes = loader.latest
            if notes is not None and notes.begins_at is None:
                notes.begins_at = batch_idx
            passes.append((notes, 0 if notes is None else batch_idx - (notes.begins_at or 0)))
        # ranks of one tensor-parallel or pipeline group must read the same samples
        if self.sharding.copies > 1 and is_compared(batch_idx):
            found = [notes.contents.pop(number, None) for notes, number in passes if notes]
            self._require_same_content(zlib.crc32(repr(found).encode()) if any(found) else None, place)
        for loader, (notes, _) in zip(loaders, passes, strict=True):
            self._require_same_order(loader, notes, batch_idx)
        # a part of 3 of 5 samples on 2 ranks weighs 3 * 2 / 5: so the mean over ranks is that over all samples
        self.weight, ranks = 1.0, self.sharding.ranks
        for samples, total in (notes.uneven[number] for notes, number in passes if notes and number in notes.uneven):
            if len(passes) > 1:
                raise ValueError(
                    f"one of {len(passes)} loaders read together ends with {total} samples, which {ranks} ranks cannot "
                    "share evenly; give it drop_last=True"
                )
            self.weight = samples * ranks / total

    def end(self) -> None:
        """All loaders have been read."""
        self.weight = 1.0
        self._exchange(SyncPoint.PASS_ENDS)

    def share_generators(self, loaders: Sequence[Any]) -> None:
        """Set the host's generators, and those that users gave their loaders, to rank 0's. Collective."""
        generators = list({id(each): each for loader in loaders for each in generators_of(loader)}.values())
        states = [(RandomState.now(), [generator.get_state() for generator in generators])]
        dist.broadcast_object_list(states, 0, group=self._group)
        # rank 0's
        host, own = states[0]
        host.restore()
        for generator, state in zip(generators, own, strict=True):
            generator.set_state(state)

    def _exchange(
        self, point: SyncPoint, describe: Callable[[], Words] | None = None, **numbers: int
    ) -> tuple[Message, Message]:
        """Send one small message; ranks say more only once they know that they differ."""
        asked = {"stop": self._signals.stop, "requeue": self._signals.requeue, "save_failed": self._saves.failed}
        message = Message(point, **numbers, **asked)  # type: ignore[arg-type]
        most, least = Exchange(message, self._group).wait(describe or Words(PLACES[point]))
        # each rank has noted these by itself; from here on all do the same
        if most.save_failed:
            self._saves.wait()
            raise RuntimeError("another rank could not finish what follows a save; its message says why")
        if most.stop or most.requeue:
            self._signals.answer(int(most.stop), bool(most.requeue))
        return most, least

    def _read_settings(self) -> None:
        """Update the checksum of learning rates and the like. A GPU's tensor is read only once it has changed."""
        found, settings = self._find_settings(), list[Any]()
        for value in found:
            if isinstance(value, Tensor):
                # reading a value of a GPU waits for it, reading its version does not
                settings.append(float(value) if value.device.type == "cpu" else (id(value), value._version))
            else:
                settings.append(value)
        if settings != self._settings:
            self._settings = settings
            numbers = [float(value) if isinstance(value, Tensor) else value for value in found]
            self._settings_checksum = zlib.crc32(repr(numbers).encode())

    def _require_same_content(self, checksum: int | None, place: str) -> None:
        """Raise on every rank if ranks that must read the same batch read different ones. Collective over all ranks.

        Args:
            checksum: of this rank's batch; None where it is not known.
            place: names the batch in the error.
        """
        # [2, shards]: checksum and its negative, in the column of the part of the data that this rank reads
        shard, shards = self.sharding.rank, self.sharding.ranks
        numbers = torch.full((2, shards), -torch.inf, dtype=torch.float64)
        if checksum is not None:
            numbers[:, shard] = torch.tensor([checksum, -checksum])
        highest(numbers, self._group).wait()
        most, least = numbers[0], -numbers[1]
        if not bool(((most != least) & most.isfinite()).any()):
            return
        received = gather_objects((shard, checksum), self._group)
        for each in range(shards):
            ranks = [rank for rank, (other, _) in enumerate(received) if other == each]
            if len({received[rank][1] for rank in ranks}) > 1:
                raise ValueError(
                    f"{place} differs between ranks {', '.join(map(str, ranks))}, which must read the same samples: "
                    "each holds a part of the model for them. Where data is made at random, call seed_everything(N) "
                    "before it is made, with one N on all ranks. Otherwise make what is random in the dataset or in "
                    "loader workers depend on the sample, or leave out seed_everything(workers=True), which seeds "
                    "workers by rank; a loader that divides itself takes the part in "
                    "trainer.distributed_sampler_kwargs, not by its rank"
                )

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


class MeshCallback(Callback):
    """Stands first among the trainer's callbacks for the time of a run.

    Args:
        batches: on which ranks agree.
        others_come: returns whether all ranks are there for what this one is about to do, though it handles an
            exception.
        unite_buffers: gives all ranks the same buffers; all must call.
        unite_metrics: gives the ranks of a pipeline the same metrics; all must call.
        begin_validation: divides a model that is not yet divided, and takes the reason.
    """

    def __init__(
        self,
        batches: Batches,
        others_come: Callable[[str], bool],
        unite_buffers: Callable[[], None],
        unite_metrics: Callable[[], None],
        begin_validation: Callable[[str], None],
    ) -> None:
        self._batches, self._others_come = batches, others_come
        self._unite_buffers, self._unite_metrics = unite_buffers, unite_metrics
        self._begin_validation, self._patched, self._finetuned = begin_validation, ExitStack(), ExitStack()
        self._hidden: list[Callback] = []
        self._uncounted: list[int] = []  # the loader of each batch of predictions that does not count

    # Lightning calls every hook of a callback in every step, and none that is None
    on_train_batch_end: Any = None
    on_before_backward: Any = None
    on_after_backward: Any = None
    on_before_optimizer_step: Any = None
    on_before_zero_grad: Any = None

    def close(self, trainer: Trainer) -> None:
        """The run is over, wherever it stood."""
        callbacks = internals.callbacks_of(trainer)
        if self in callbacks:  # Lightning's Tuner puts another list in the place of that one
            callbacks.remove(self)
        self._finetuned.close()
        self._patched.close()
        self.on_predict_batch_end(trainer)

    # ---------------------------------------------------------------- before a pass over the data

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Come before the validation of the fit reads its loaders, for which Lightning has no hook."""
        loop: Any = trainer.fit_loop.epoch_loop.val_loop

        def reset() -> None:
            self._begin_validation("a validation comes first; Trainer(num_sanity_val_steps=0) runs none then")
            self._batches.begin_pass(internals.combined_of(loop))
            type(loop).reset(loop)

        self._patched.enter_context(internals.replaced(loop, "reset", reset))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The loops run from here."""
        if self._batches.first_pass is not None:
            self._batches.first_pass.loop_has_made_loaders()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let samplers on all ranks draw from the same state, before the loader's iterator is made."""
        self._batches.begin_pass(internals.combined_of(trainer.fit_loop))
        internals.find_parameters_by_identity(internals.callbacks_of(trainer), self._finetuned)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All ranks evaluate the same model."""
        self._unite_buffers()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make buffers, which each rank changed, the same everywhere."""
        self._batches.leave()  # a rank for which training goes on meets this at the beginning of its next epoch
        self._unite_buffers()

    # ---------------------------------------------------------------- each batch

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Agree on the batch."""
        self._finetuned.close()
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        self._batches.begin(internals.combined_of(trainer.fit_loop), batch, batch_idx, 0, is_last)

    def _begin(self, trainer: Trainer, _: LightningModule, batch: Any, batch_idx: int, loader: int = 0) -> None:
        """Agree on the batch of an evaluation."""
        loop = internals.running_evaluation(trainer)
        self._batches.begin(internals.combined_of(loop), batch, batch_idx, loader, loop.batch_progress.is_last_batch)

    on_validation_batch_start = on_test_batch_start = _begin  # type: ignore[assignment]

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Agree on the batch; nobody writes predictions for samples that do not count."""
        self._begin(trainer, pl_module, batch, batch_idx, dataloader_idx)
        if self._batches.weight == 0.0:
            self._uncounted.append(dataloader_idx)
            self._hidden = internals.callbacks_of(trainer)
            seen = [callback for callback in self._hidden if not isinstance(callback, BasePredictionWriter)]
            vars(trainer)["callbacks"] = seen

    def on_predict_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """The next batch is for everybody again."""
        if self._hidden:
            vars(trainer)["callbacks"], self._hidden = self._hidden, []

    def _unite_after_last(self, trainer: Trainer, *_: Any) -> None:
        """After the last batch of a loader Lightning computes its values, before the pass is over."""
        if internals.running_evaluation(trainer).batch_progress.is_last_batch:
            self._unite_metrics()

    on_validation_batch_end = on_test_batch_end = _unite_after_last  # type: ignore[assignment]

    # ---------------------------------------------------------------- after a pass over the data

    def _end_pass(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches.end()
        self._unite_metrics()
        _ = trainer.callback_metrics  # Lightning reduces them now, on all ranks at once, before one of them reads any

    on_train_epoch_end = on_validation_epoch_end = on_test_epoch_end = _end_pass

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop predictions for samples that do not count; they come last."""
        self._batches.end()
        for dataloader_idx in self._uncounted:
            for kept in internals.kept_predictions(trainer.predict_loop, dataloader_idx):
                if kept:
                    kept.pop()
        self._uncounted.clear()

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        """Come before `ModelCheckpoint`, which says that it saved a checkpoint whatever became of it."""
        found = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        saving = [each for each in found if each.save_on_exception]
        if saving and not self._others_come("save_checkpoint"):
            log.warning("No checkpoint of this exception: the parts of other ranks are missing, for not all came to it")
            for each in saving:
                self._patched.callback(setattr, each, "save_on_exception", True)
                each.save_on_exception = False
