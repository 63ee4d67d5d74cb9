"""Agreement of ranks on the batches that they read: the same structure and number of batches, and each one's weight.

At each sync point every rank sends one message of the same length (an all-reduce of some 20 numbers). Ranks at
different sync points therefore still compare messages, and all of them raise an error that says where each one is.
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

from lightning_parallel.collectives.functional import all_reduce_max
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
from lightning_parallel.values import structure_of

log = logging.getLogger(__name__)


class SyncPoint(IntEnum):
    """Point of a run at which all ranks exchange a message."""

    LOADERS = 1  #: loaders are about to be made or registered
    PASS_BEGINS = 2
    BATCH = 3
    STEP_BEGINS = 4  #: only if `on_train_batch_start` may end the epoch
    STEP_ENDS = 5
    STEP_WITHOUT_LOSS = 6
    BACKWARD = 7  #: `manual_backward` within a step
    PASS_ENDS = 8
    TRAINING_ENDS = 9


class Message(NamedTuple):
    """Numbers that a rank sends at a sync point. The first five fields must be the same on all ranks."""

    point: SyncPoint
    loader: int = 0  #: the index of the batch's loader
    batch: int = 0  #: the index of the batch
    is_last: bool = False  #: whether it is the last batch of a loader that has no length
    checksum: int = 0  #: checksum of everything else that must be the same, e.g. the structure of the batch
    samples: int = 0  #: number of this rank's samples in the batch
    means: int = 0  #: number of means that the step computed; ranks may differ
    learned_means: int = 0  #: number of these that have gradients
    stop: int = 0  #: number of the signal that asked this process to stop, 0 if none has
    requeue: bool = False  #: whether SLURM has asked to requeue
    save_failed: bool = False  #: whether a save in the background has failed


class Words(NamedTuple):
    """Description of a message for errors, made only if ranks differ."""

    place: str  #: e.g. "batch 3 of loader 0"
    structure: str = ""  #: the structure of the batch
    settings: str = ""  #: learning rates, momenta and weight decays


class Exchange:
    """Sends this rank's message at once; `wait` returns the result. Collective over `group`, which has all ranks."""

    def __init__(self, message: Message, group: dist.ProcessGroup) -> None:
        self._point, self._group = message.point, group
        # [2 x fields], the fields and their negatives: one maximum yields the highest and the lowest of all ranks
        numbers = np.array(message, dtype=np.float64)  # torch would take four times as long to read the tuple
        self._numbers = torch.from_numpy(np.concatenate((numbers, -numbers)))
        self._work = all_reduce_max(self._numbers, group)

    def wait(self, words: Words | Callable[[], Words]) -> tuple[Message, Message]:
        """Wait for all ranks, and return the highest and the lowest number of each field.

        Args:
            words: description of this rank's message, or a function that returns it.

        Raises:
            ValueError: on every rank, if ranks are at different points or differ in one of the first five fields.
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
            require_same("the end of the data", places, f"{EVENLY}, or set trainer.should_stop on all ranks together")
            require_same("the structure of a batch", structures, "check the dataset there")
            remedy = "set them on all ranks, as in on_train_batch_end, from values that all ranks have: "
            remedy += "trainer.callback_metrics, or self.all_gather(loss).mean()"
            require_same("learning rates, momenta and weight decays of optimizers", settings, remedy)
        return most, least


EVENLY = "every rank must read equally many batches"
RULES = {
    SyncPoint.LOADERS: (
        "which loaders are read next",
        "give every rank equally many loaders, in fit(...) and in hooks that return them",
    ),
    SyncPoint.STEP_WITHOUT_LOSS: (
        "whether a step returns a loss",
        "Lightning cannot skip a batch on several ranks: return a loss times zero",
    ),
    SyncPoint.STEP_ENDS: ("what is logged", "log in the same way on all ranks, or on one with rank_zero_only=True"),
    SyncPoint.BACKWARD: ("what ranks do next", "call self.manual_backward equally often on all ranks"),
    SyncPoint.STEP_BEGINS: (
        "whether an epoch goes on",
        "return -1 from on_train_batch_start on all ranks or none: decide by batch_idx, or by values that all have",
    ),
}
"""By sync point at which only some ranks are, or all with different checksums: what differs, and the remedy."""


PLACES = {
    SyncPoint.PASS_BEGINS: "a pass over the data begins",
    SyncPoint.PASS_ENDS: "no batch is left",
    SyncPoint.TRAINING_ENDS: "training is over",
}


class BackgroundSaves(Protocol):
    """Saves that run in the background of training."""

    failure: BaseException | None  #: of a save on this rank, until `wait` raises it

    def wait(self) -> None:
        """Wait until nothing is being saved; raise the failure of the last save."""


class Batches:
    """Checks on all ranks together each batch of a run, and computes the weight of this rank's batch.

    Args:
        sharding: how the data is sharded.
        group: group of all ranks, for messages in host memory.
        signals: the signals that this process has received.
        saves: the saves in the background.
        settings: returns the present learning rates, momenta and weight decays.

    Attributes:
        weight: factor of this rank's batch in the mean over ranks; 0.0 if the batch does not count.
        fewest_samples: lowest number of samples that any rank has of this batch.
        first_pass: the pass whose first batch was read ahead of the loop, until it begins.
        batch_dims: the dimensions of samples according to the plan, see `ParallelPlan.batch_dims`.
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
        self._known: Any = None  # outline of the previous batch
        self._structure = self._samples = 0  # checksum of its structure, number of its samples
        self._settings, self._settings_checksum = list[Any](), 0
        self.first_pass: FirstPass | None = None
        self.batch_dims: Dims = NO_DIMS
        self.weight = 1.0
        self.fewest_samples: int | None = None

    def compare_loaders(self, name: str, number: int | str) -> None:
        """Raise on every rank if ranks are about to get different numbers of loaders. Collective over all ranks.

        Args:
            name: Lightning's name for the loaders, e.g. "val_dataloader".
            number: the number of this rank's loaders, or a description of it.
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
        """Set the random states that determine the order of loaders to rank 0's. Collective over all ranks."""
        self._exchange(SyncPoint.PASS_BEGINS)
        self.share_generators(combined.flattened)
        if self.first_pass is not None and self.first_pass.begin(combined):
            self.first_pass = None

    def leave(self) -> None:
        """Raise on every rank if training is over on this rank and continues on others. Collective over all ranks."""
        self._exchange(SyncPoint.TRAINING_ENDS)

    def begin(self, combined: Any, batch: Any, batch_idx: int, dataloader_idx: int, is_last: bool) -> None:
        """Check a batch that is about to be used, and compute its weight. Collective over all ranks.

        Raises:
            ValueError: on every rank, if the structures of batches differ, or one rank ends before the others.
            SIGTERMException: on every rank, if one was asked to stop; KeyboardInterrupt if that was by SIGINT.
            Exception: on every rank, if a checkpoint could not be saved in the background.
        """
        loaders, iterators = internals.current_loaders(combined, dataloader_idx)
        last = is_last and any(length_of(loader) is None for loader in loaders)
        place = f"batch {batch_idx} of loader {dataloader_idx}"
        outline = structure_of(batch), self.batch_dims  # a pipeline sets `batch_dims` after its first batch
        if outline[0] is None or outline != self._known:  # most batches have the outline of the previous one
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
        passes = list[tuple[PassNotes | None, int]]()  # (notes or None if undivided, index of the batch in the pass)
        for loader, iterator in zip(loaders, iterators or [None], strict=True):
            # `loader.latest` may be of a later pass, begun since Lightning made this iterator
            notes = iterator.notes if isinstance(iterator, Reading) else None
            if iterators is None and isinstance(loader, (DividedLoader, DividedIterator)):
                notes = loader.latest
            if notes is not None and notes.begins_at is None:
                notes.begins_at = batch_idx
            passes.append((notes, 0 if notes is None else batch_idx - (notes.begins_at or 0)))
        # ranks of one tensor-parallel or pipeline group must read the same samples
        if self.sharding.copies > 1 and is_compared(batch_idx):
            contents = [notes.contents.pop(number, None) for notes, number in passes if notes]
            self._require_same_content(zlib.crc32(repr(contents).encode()) if any(contents) else None, place)
        for loader, (notes, _) in zip(loaders, passes, strict=True):
            self._require_same_order(loader, notes, batch_idx)
        # 3 of 5 samples on 2 ranks weigh 3 * 2 / 5, so that the mean over ranks is the mean over all samples
        self.weight, ranks = 1.0, self.sharding.ranks
        for samples, total in (notes.uneven[number] for notes, number in passes if notes and number in notes.uneven):
            if len(passes) > 1:
                raise ValueError(
                    f"one of {len(passes)} loaders read together ends with {total} samples, which {ranks} ranks cannot "
                    "share evenly; give it drop_last=True"
                )
            self.weight = samples * ranks / total

    def end(self) -> None:
        """Check that all ranks have read all batches of their loaders. Collective over all ranks."""
        self.weight = 1.0
        self._exchange(SyncPoint.PASS_ENDS)

    def share_generators(self, loaders: Sequence[Any]) -> None:
        """Set the host's generators, and those that users passed to loaders, to rank 0's. Collective over all ranks."""
        generators = list({id(each): each for loader in loaders for each in generators_of(loader)}.values())
        states = [(RandomState.now(), [generator.get_state() for generator in generators])]
        dist.broadcast_object_list(states, 0, group=self._group)
        # the states of rank 0
        host_state, generator_states = states[0]
        host_state.restore()
        for generator, state in zip(generators, generator_states, strict=True):
            generator.set_state(state)

    def _exchange(
        self, point: SyncPoint, describe: Callable[[], Words] | None = None, **numbers: int
    ) -> tuple[Message, Message]:
        """Exchange a message, then act on any rank's signal or failed save; call `describe` only if ranks differ."""
        failed, signals = self._saves.failure is not None, self._signals
        numbers |= {"stop": signals.stop, "requeue": signals.requeue, "save_failed": failed}
        message = Message(point, **numbers)  # type: ignore[arg-type]
        most, least = Exchange(message, self._group).wait(describe or Words(PLACES[point]))
        # one rank may have noted these alone; from here on all ranks do the same
        if most.save_failed:
            self._saves.wait()
            raise RuntimeError("another rank could not finish a background save; its message says why")
        if most.stop or most.requeue:
            self._signals.answer(int(most.stop), bool(most.requeue))
        return most, least

    def _read_settings(self) -> None:
        """Update the checksum of learning rates and the like. A tensor on a GPU is read only if it has changed."""
        values, settings = self._find_settings(), list[Any]()
        for value in values:
            if isinstance(value, Tensor):
                # reading a value synchronizes with the GPU, reading its version counter does not
                settings.append(float(value) if value.device.type == "cpu" else (id(value), value._version))
            else:
                settings.append(value)
        if settings != self._settings:
            self._settings = settings
            numbers = [float(value) if isinstance(value, Tensor) else value for value in values]
            self._settings_checksum = zlib.crc32(repr(numbers).encode())

    def _require_same_content(self, checksum: int | None, place: str) -> None:
        """Raise on every rank if ranks that must read the same batch read different ones. Collective over all ranks.

        Args:
            checksum: checksum of this rank's batch; None if it is not known.
            place: the batch's name in the error.
        """
        # [2, shards of the data]: checksum and its negative, in the column of the shard that this rank reads
        shard, shards = self.sharding.rank, self.sharding.ranks
        numbers = torch.full((2, shards), -torch.inf, dtype=torch.float64)
        if checksum is not None:
            numbers[:, shard] = torch.tensor([checksum, -checksum])
        all_reduce_max(numbers, self._group).wait()
        most, least = numbers[0], -numbers[1]
        if not bool(((most != least) & most.isfinite()).any()):
            return
        received = gather_objects((shard, checksum), self._group)
        for index in range(shards):
            ranks = [rank for rank, (other, _) in enumerate(received) if other == index]
            if len({received[rank][1] for rank in ranks}) > 1:
                raise ValueError(
                    f"{place} differs between ranks {', '.join(map(str, ranks))}, which must read the same samples: "
                    "each holds a part of the model. If data is made at random, call seed_everything(N) before it is "
                    "made, with the same N on all ranks. Otherwise derive random choices in the dataset or in loader "
                    "workers from the sample, or leave out seed_everything(workers=True), which seeds workers by "
                    "rank. A loader that divides its data itself must do so by trainer.distributed_sampler_kwargs, "
                    "not by its rank"
                )

    def _require_same_order(self, loader: Any, notes: PassNotes | None, batch_idx: int) -> None:
        """Raise on every rank if streams (the first sample of each worker) or orders of samplers differ. Collective."""
        dataset = loader.dataset if isinstance(loader, DividedLoader) else None
        if isinstance(dataset, DividedIterable) and batch_idx < len(dataset.first_samples):
            what = f"the stream of {type(dataset.dataset).__name__}"
            # batch 0 compares the numbers of workers, so that ranks make equally many of these calls
            value = f"checksum {int(dataset.first_samples[batch_idx])}, {len(dataset.first_samples)} workers"
        elif batch_idx == 0 and notes is not None and notes.order:
            what = f"the order of the samples that {type(loader.divided.source).__name__} yields"
            value = f"checksum {notes.order}"
        else:
            return
        remedy = "if it divides its data by rank, pass Trainer(use_distributed_sampler=False)"
        require_same(what, gather_objects(value, self._group), remedy)


class MeshCallback(Callback):
    """First of the trainer's callbacks during a run; connects `Batches` to Lightning's hooks.

    Args:
        batches: checks the batches of the run.
        all_ranks_join: returns whether all ranks take part in the named action, although this one handles an exception.
        unite_buffers: makes buffers the same on all ranks. Collective.
        unite_metrics: makes metrics the same on the ranks of a pipeline. Collective.
        begin_validation: divides the model if that has not happened yet; takes the reason, for messages.
    """

    def __init__(
        self,
        batches: Batches,
        all_ranks_join: Callable[[str], bool],
        unite_buffers: Callable[[], None],
        unite_metrics: Callable[[], None],
        begin_validation: Callable[[str], None],
    ) -> None:
        self._batches, self._all_ranks_come = batches, all_ranks_join
        self._sync_buffers, self._sync_metrics = unite_buffers, unite_metrics
        self._begin_validation, self._patched, self._finetuned = begin_validation, ExitStack(), ExitStack()
        self._hidden: list[Callback] = []
        self._uncounted: list[int] = []  # the loader's index, for each batch of predictions that does not count

    # Lightning calls each of these in every step unless it is None
    on_train_batch_end: Any = None
    on_before_backward: Any = None
    on_after_backward: Any = None
    on_before_optimizer_step: Any = None
    on_before_zero_grad: Any = None

    def close(self, trainer: Trainer) -> None:
        """Undo everything at the end of a run, whether it succeeded or failed."""
        callbacks = internals.callbacks_of(trainer)
        if self in callbacks:  # not if Lightning's Tuner has replaced the list
            callbacks.remove(self)
        self._finetuned.close()
        self._patched.close()
        self.on_predict_batch_end(trainer)

    # ---------------------------------------------------------------- before a pass over the data

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a pass before validation in `fit` reads its loaders, a moment for which Lightning has no hook."""
        loop: Any = trainer.fit_loop.epoch_loop.val_loop

        def reset() -> None:
            self._begin_validation("a validation comes first; Trainer(num_sanity_val_steps=0) runs none then")
            self._batches.begin_pass(internals.combined_of(loop))
            type(loop).reset(loop)

        self._patched.enter_context(internals.replaced(loop, "reset", reset))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set random states if the first batch was read ahead: Lightning has made the training loaders."""
        if self._batches.first_pass is not None:
            self._batches.first_pass.after_setup_data()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the random states of samplers to rank 0's, before the loader's iterator is made."""
        self._batches.begin_pass(internals.combined_of(trainer.fit_loop))
        internals.find_parameters_by_identity(internals.callbacks_of(trainer), self._finetuned)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make buffers the same on all ranks, so that all evaluate the same model."""
        self._sync_buffers()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make buffers, which each rank has updated by its own batches, the same on all ranks."""
        self._batches.leave()  # on a rank that trains on, the beginning of its next epoch exchanges the message
        self._sync_buffers()

    # ---------------------------------------------------------------- each batch

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Check the batch on all ranks."""
        self._finetuned.close()
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        self._batches.begin(internals.combined_of(trainer.fit_loop), batch, batch_idx, 0, is_last)

    def _begin(self, trainer: Trainer, _: LightningModule, batch: Any, batch_idx: int, loader: int = 0) -> None:
        """Check the batch of an evaluation on all ranks."""
        loop = internals.running_evaluation(trainer)
        self._batches.begin(internals.combined_of(loop), batch, batch_idx, loader, loop.batch_progress.is_last_batch)

    on_validation_batch_start = on_test_batch_start = _begin  # type: ignore[assignment]

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Check the batch on all ranks; hide prediction writers from the trainer if it does not count."""
        self._begin(trainer, pl_module, batch, batch_idx, dataloader_idx)
        if self._batches.weight == 0.0:
            self._uncounted.append(dataloader_idx)
            self._hidden = internals.callbacks_of(trainer)
            visible = [callback for callback in self._hidden if not isinstance(callback, BasePredictionWriter)]
            vars(trainer)["callbacks"] = visible

    def on_predict_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Restore the callbacks that were hidden for this batch."""
        if self._hidden:
            vars(trainer)["callbacks"], self._hidden = self._hidden, []

    def _unite_after_last(self, trainer: Trainer, *_: Any) -> None:
        """Unite metrics after a loader's last batch, as Lightning then computes them before the pass has ended."""
        if internals.running_evaluation(trainer).batch_progress.is_last_batch:
            self._sync_metrics()

    on_validation_batch_end = on_test_batch_end = _unite_after_last  # type: ignore[assignment]

    # ---------------------------------------------------------------- after a pass over the data

    def _end_pass(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches.end()
        self._sync_metrics()
        _ = trainer.callback_metrics  # Lightning reduces them now, on all ranks; later perhaps only one rank reads any

    on_train_epoch_end = on_validation_epoch_end = on_test_epoch_end = _end_pass

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the predictions of batches that do not count, which are the last ones of their loaders."""
        self._batches.end()
        for dataloader_idx in self._uncounted:
            for items in internals.kept_predictions(trainer.predict_loop, dataloader_idx):
                if items:
                    items.pop()
        self._uncounted.clear()

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        """Disable `save_on_exception` unless all ranks can save: `ModelCheckpoint` would report a save in any case."""
        callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        saving = [callback for callback in callbacks if callback.save_on_exception]
        if saving and not self._all_ranks_come("save_checkpoint"):
            log.warning("No checkpoint of this exception: not all ranks could save, so shards of others are missing")
            for callback in saving:
                self._patched.callback(setattr, callback, "save_on_exception", True)
                callback.save_on_exception = False
