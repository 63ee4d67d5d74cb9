"""Resumption from a checkpoint: random states, and the position in the data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_parallel.checkpoint.files import reading
from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies.data.loaders import is_position, needs_epoch_end_state, resume
from lightning_parallel.strategies.data.randomness import RandomState, seed_per_data_rank
from lightning_parallel.strategies.lightning_package import ModelCheckpoint, Trainer
from lightning_parallel.strategies.ranks.agreement import gather_objects

RANDOMNESS = "lightning_parallel_randomness"
"""Key of a checkpoint for the random states of all ranks."""
POSITIONS = "lightning_parallel_positions"
"""Key of a checkpoint for the positions of divided loaders, by index among the loaders that have a state.

They are not in Lightning's own list of loader states, which it refuses if the trainer has no loaders with a state.
"""


class Resumption:
    """State of a run that resumes from a checkpoint; nothing in a run that does not.

    Attributes:
        wrote: whether this run has written a checkpoint; reading that (learning rate finder) is no resumption.
    """

    def __init__(self) -> None:
        self._resumes = self.wrote = False
        self._random: RandomState | None = None

    def keep(self, checkpoint: dict[str, Any], trainer: Trainer, host: dist.ProcessGroup) -> None:
        """Add to a checkpoint what a run needs to resume from it. Collective over `host`, all ranks.

        A resumed run skips the validation that follows the checkpoint's batch in Lightning. So the random states are
        those after this validation, as far as its loaders draw.
        """
        with RandomState.now().replayed():
            for loader in internals.loaders_left_to_validate(trainer):
                if isinstance(loader, DataLoader) and loader.generator is None:
                    torch.empty((), dtype=torch.int64).random_()  # as a loader draws a seed for its workers
            randomness = RandomState.now(device=trainer.strategy.root_device)
        checkpoint[RANDOMNESS] = [randomness.as_dict() for randomness in gather_objects(randomness, host)]
        fit_loop = internals.saved_fit_loop(checkpoint)
        states = fit_loop.pop("combined_loader", [])
        positions = checkpoint[POSITIONS] = {index: state for index, state in enumerate(states) if is_position(state)}
        if others := [state for index, state in enumerate(states) if index not in positions]:
            fit_loop["combined_loader"] = others

    def loaded(self, checkpoint: dict[str, Any], path: Any, fitting: bool, rank: int) -> None:
        """Take what `keep` has added to a checkpoint that was read, before Lightning restores its loops."""
        self._resumes = fitting and not self.wrote and "loops" in checkpoint  # a file of weights alone has no loops
        with reading(path):
            positions, fit_loop = checkpoint.pop(POSITIONS, {}), internals.saved_fit_loop(checkpoint)
            for index in sorted(positions):
                fit_loop.setdefault("combined_loader", []).insert(index, positions[index])
            states = checkpoint.get(RANDOMNESS) if self._resumes else None  # perhaps of fewer ranks than now
            self._random = RandomState.from_dict(states[rank % len(states)]) if states else None

    def begin(self, trainer: Trainer, reader: int, host: dist.ProcessGroup) -> None:
        """Restore random states and data positions before the loops run; `reader` is the data rank. Collective."""
        self._restore(trainer, reader, host)
        if self._resumes:
            for callback in trainer.checkpoint_callbacks:
                # The present step, e.g. 3, is saved already: a new ModelCheckpoint that saves between batches would
                # save step 3 again after the next batch, within an accumulation, over the checkpoint of step 3.
                if isinstance(callback, ModelCheckpoint) and not callback.every_n_epochs:
                    callback._last_global_step_saved = trainer.global_step
            resume(trainer.fit_loop)

    def begin_training(self, trainer: Trainer, reader: int, host: dist.ProcessGroup) -> None:
        """Restore random states again after a resumed run has made its loaders, which draws. Collective over `host`."""
        loop, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
        is_within_epoch = 0 < batches.current.ready < trainer.num_training_batches and not batches.is_last_batch
        if loop.restarted_mid_epoch and batches.is_last_batch:
            loop.reset_restart_stage()  # else Lightning takes the next epoch for the one that has ended
            if loop.epoch_loop.restarted_on_train_batch_end and trainer.num_training_batches == float("inf"):
                # The next epoch must count its batches from 0. Lightning resets them in `_TrainingEpochLoop.reset` if
                # the length is known, and otherwise continues from the last batch.
                epoch = loop.epoch_loop
                batches.increment_completed()
                batches.reset_on_run()
                epoch.scheduler_progress.reset_on_run()
                epoch.automatic_optimization.optim_progress.reset_on_run()
                epoch.val_loop.batch_progress.total.reset()
                epoch.reset_restart_stage()
        if is_within_epoch:
            self._restore(trainer, reader, host)
        elif needs_epoch_end_state(loop):  # Lightning does not load loader states at the end of an epoch
            self._restore(trainer, reader, host)
            resume(loop)
        self._random = None

    def _restore(self, trainer: Trainer, reader: int, host: dist.ProcessGroup) -> None:
        if self._random is not None:
            device = trainer.strategy.root_device
            self._random.restore(device=device)
            seed_per_data_rank(device, reader, host)
