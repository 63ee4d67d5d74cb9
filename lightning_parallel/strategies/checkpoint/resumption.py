"""Goes on from a checkpoint: a run takes up random states, its place in the data and what its steps had found."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_parallel.checkpoint.damage import reading
from lightning_parallel.strategies.checkpoint.whole import put_positions_back, set_positions_aside
from lightning_parallel.strategies.data.loaders import outlives_epochs, resume
from lightning_parallel.strategies.data.randomness import (
    RandomState,
    RankRandomness,
    seed_per_data_rank,
)
from lightning_parallel.strategies.lightning_package import Trainer
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.strategies.trainer.lightnings import (
    count_as_saved,
    end_epoch_without_length,
    loader_states,
    loaders_left_to_validate,
)
from lightning_parallel.techniques.step import Step

RANDOMNESS = "lightning_parallel_randomness"
"""Where a checkpoint holds the random states of all ranks."""
FINDINGS = "lightning_parallel_findings"
"""Where a checkpoint holds the `Step.findings` of all ranks."""


class Resumption:
    """The checkpoint of one run, if it goes on from one."""

    def __init__(self) -> None:
        self._resumes = False
        self._random: RankRandomness | None = None
        self._findings: frozenset[str] = frozenset()
        #: whether this run has written a checkpoint: the learning rate finder reads its own back, and goes on from none
        self.wrote = False

    @staticmethod
    def keep(checkpoint: dict[str, Any], trainer: Trainer, step: Step, host: dist.ProcessGroup) -> None:
        """Writes into a checkpoint what a run that goes on from it takes up. All ranks must call.

        Lightning goes on behind the validation that follows a batch: so do random states, as far as its loaders draw.
        """
        with RandomState.now().replayed():
            for loader in loaders_left_to_validate(trainer):
                if isinstance(loader, DataLoader) and loader.generator is None:
                    torch.empty((), dtype=torch.int64).random_()  # a loader draws a seed for its workers
            randomness = RankRandomness.now(trainer.strategy.root_device)
        said = gather_objects((randomness, step.findings), host)
        checkpoint[RANDOMNESS] = [randomness.as_dict() for randomness, _ in said]
        checkpoint[FINDINGS] = sorted(frozenset().union(*(findings for _, findings in said)))
        set_positions_aside(checkpoint)

    def loaded(self, checkpoint: dict[str, Any], path: Any, fitting: bool, rank: int) -> None:
        """A checkpoint has been read, by which the trainer's loops will stand where they stood."""
        self._resumes = fitting and not self.wrote and "loops" in checkpoint  # not from weights alone
        with reading(path):
            put_positions_back(checkpoint)
            states = checkpoint.get(RANDOMNESS) if self._resumes else None  # of fewer ranks, perhaps
            self._random = RankRandomness.from_dict(states[rank % len(states)]) if states else None
            self._findings = frozenset(checkpoint.get(FINDINGS, ()) if self._resumes else ())

    def recall(self, step: Step) -> None:
        """Gives the step of the divided model what the steps of the run before had found."""
        step.recall(self._findings)

    def begin(self, trainer: Trainer, reader: int, host: dist.ProcessGroup) -> None:
        """The loops are about to run. All ranks must call; see `seed_per_data_rank`."""
        self._restore(trainer, reader, host)
        if self._resumes:
            count_as_saved(trainer)
            resume(trainer.fit_loop)

    def begin_training(self, trainer: Trainer, reader: int, host: dist.ProcessGroup) -> None:
        """A run that goes on has just made its loaders anew; within an epoch the draws of that do not count."""
        loop, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
        within = 0 < batches.current.ready < trainer.num_training_batches and not batches.is_last_batch
        if loop.restarted_mid_epoch and batches.is_last_batch:
            loop.reset_restart_stage()  # Lightning would take the next epoch for the one that has ended
            if loop.epoch_loop.restarted_on_train_batch_end and trainer.num_training_batches == float("inf"):
                end_epoch_without_length(loop)
        if within:
            self._restore(trainer, reader, host)
        elif any(map(outlives_epochs, loader_states(loop))):  # Lightning does not load states after an epoch
            self._restore(trainer, reader, host)
            resume(loop)
        self._random = None

    def _restore(self, trainer: Trainer, reader: int, host: dist.ProcessGroup) -> None:
        if self._random is not None:
            device = trainer.strategy.root_device
            self._random.restore(device)
            seed_per_data_rank(device, reader, host)
