"""Goes on from a checkpoint: a run takes up random states, its place in the data and what its steps had found."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_parallel.checkpoint.files import reading
from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies.data.loaders import GLOBAL_BATCH, outlives_epochs, resume
from lightning_parallel.strategies.data.randomness import RandomState, seed_per_data_rank
from lightning_parallel.strategies.lightning_package import ModelCheckpoint, Trainer
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.techniques.step import Step

RANDOMNESS = "lightning_parallel_randomness"
"""Where a checkpoint holds the random states of all ranks."""
FINDINGS = "lightning_parallel_findings"
"""Where a checkpoint holds the `Step.findings` of all ranks."""
POSITIONS = "lightning_parallel_positions"
"""Where a checkpoint holds how far the divided loaders had come, by their number among the loaders with a state.

Lightning refuses a list of states of loaders where it has no such loaders.
"""


class Resumption:
    """The checkpoint of one run, if it goes on from one.

    Attributes:
        findings: the `Step.findings` of the run before.
        wrote: whether this run has written a checkpoint: the learning rate finder reads its own back, and goes on from
            none.
    """

    def __init__(self) -> None:
        self._resumes = self.wrote = False
        self._random: RandomState | None = None
        self.findings: frozenset[str] = frozenset()

    def keep(self, checkpoint: dict[str, Any], trainer: Trainer, step: Step, host: dist.ProcessGroup) -> None:
        """Write into a checkpoint what a run that goes on from it takes up. All ranks must call.

        Lightning goes on behind the validation that follows a batch: so do random states, as far as its loaders draw.
        """
        with RandomState.now().replayed():
            for loader in internals.loaders_left_to_validate(trainer):
                if isinstance(loader, DataLoader) and loader.generator is None:
                    torch.empty((), dtype=torch.int64).random_()  # a loader draws a seed for its workers
            randomness = RandomState.now(device=trainer.strategy.root_device)
        said = gather_objects((randomness, step.findings), host)
        checkpoint[RANDOMNESS] = [randomness.as_dict() for randomness, _ in said]
        checkpoint[FINDINGS] = sorted(frozenset().union(*(findings for _, findings in said)))
        fit_loop = internals.saved_fit_loop(checkpoint)
        states = fit_loop.pop("combined_loader", [])
        ours = {"consumed", "random"}, {"batches", "own"}
        positions = {}
        for index, state in enumerate(states):
            if isinstance(state, dict) and state.keys() - {GLOBAL_BATCH} in ours:
                positions[index] = state
        checkpoint[POSITIONS] = positions
        if others := [state for index, state in enumerate(states) if index not in positions]:
            fit_loop["combined_loader"] = others

    def loaded(self, checkpoint: dict[str, Any], path: Any, fitting: bool, rank: int) -> None:
        """A checkpoint has been read, by which the trainer's loops will stand where they stood."""
        self._resumes = fitting and not self.wrote and "loops" in checkpoint  # not from weights alone
        with reading(path):
            positions, fit_loop = checkpoint.pop(POSITIONS, {}), internals.saved_fit_loop(checkpoint)
            for index in sorted(positions):
                fit_loop.setdefault("combined_loader", []).insert(index, positions[index])
            states = checkpoint.get(RANDOMNESS) if self._resumes else None  # of fewer ranks, perhaps
            self._random = RandomState.from_dict(states[rank % len(states)]) if states else None
            self.findings = frozenset(checkpoint.get(FINDINGS, ()) if self._resumes else ())

    def begin(self, trainer: Trainer, reader: int, host: dist.ProcessGroup) -> None:
        """The loops are about to run. All ranks must call; see `seed_per_data_rank`."""
        self._restore(trainer, reader, host)
        if self._resumes:
            for callback in trainer.checkpoint_callbacks:
                # the present step is saved: a new ModelCheckpoint that saves between batches would save step 3 again
                # after the next batch, within an accumulation, over the checkpoint of step 3
                if isinstance(callback, ModelCheckpoint) and not callback.every_n_epochs:
                    callback._last_global_step_saved = trainer.global_step
            resume(trainer.fit_loop)

    def begin_training(self, trainer: Trainer, reader: int, host: dist.ProcessGroup) -> None:
        """A run that goes on has just made its loaders anew; within an epoch the draws of that do not count."""
        loop, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
        within = 0 < batches.current.ready < trainer.num_training_batches and not batches.is_last_batch
        if loop.restarted_mid_epoch and batches.is_last_batch:
            loop.reset_restart_stage()  # Lightning would take the next epoch for the one that has ended
            if loop.epoch_loop.restarted_on_train_batch_end and trainer.num_training_batches == float("inf"):
                # The next epoch counts its batches from 0. Lightning sees to that in `_TrainingEpochLoop.reset` where
                # the length is known, and else counts on from the last batch.
                epoch = loop.epoch_loop
                batches.increment_completed()
                batches.reset_on_run()
                epoch.scheduler_progress.reset_on_run()
                epoch.automatic_optimization.optim_progress.reset_on_run()
                epoch.val_loop.batch_progress.total.reset()
                epoch.reset_restart_stage()
        if within:
            self._restore(trainer, reader, host)
        elif outlives_epochs(loop):  # Lightning does not load states after an epoch
            self._restore(trainer, reader, host)
            resume(loop)
        self._random = None

    def _restore(self, trainer: Trainer, reader: int, host: dist.ProcessGroup) -> None:
        if self._random is not None:
            device = trainer.strategy.root_device
            self._random.restore(device=device)
            seed_per_data_rank(device, reader, host)
