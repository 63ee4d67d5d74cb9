"""Goes on from a checkpoint: a run takes up random states and its place in the data at its start."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_parallel.strategies.checkpoint.whole import put_positions_back
from lightning_parallel.strategies.data.loaders import resume
from lightning_parallel.strategies.data.randomness import RankRandomness, kept_randomness


class Resumption:
    """The checkpoint of one run, if it goes on from one."""

    def __init__(self) -> None:
        self._resumes = False
        self._random: RankRandomness | None = None
        #: whether this run has written a checkpoint: the learning rate finder reads its own back, and goes on from none
        self.wrote = False

    def loaded(self, checkpoint: dict[str, Any], fitting: bool, rank: int) -> None:
        """A checkpoint has been read, by which the trainer's loops will stand where they stood."""
        put_positions_back(checkpoint)
        self._resumes = fitting and not self.wrote and "loops" in checkpoint  # not from weights alone
        self._random = kept_randomness(checkpoint, rank) if self._resumes else None

    def begin(self, trainer: Trainer, device: torch.device) -> None:
        """The loops are about to run."""
        if self._random is not None:
            self._random.restore(device)
        if self._resumes:
            resume(trainer.fit_loop)

    def begin_training(self, trainer: Trainer, device: torch.device) -> None:
        """A run resumed within an epoch has just made its loaders anew; the draws of that do not count."""
        loop = trainer.fit_loop
        if loop.restarted_mid_epoch and loop.epoch_loop.batch_progress.is_last_batch:
            loop.reset_restart_stage()  # Lightning would take the next epoch for the one that has ended
        within = 0 < trainer.fit_loop.epoch_loop.batch_progress.current.ready < trainer.num_training_batches
        if self._random is not None and within:
            self._random.restore(device)
        self._random = None
