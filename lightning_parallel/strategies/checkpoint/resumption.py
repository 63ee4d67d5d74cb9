"""Goes on from a checkpoint: a run takes up random states, its place in the data and what its steps had found."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_parallel.strategies.checkpoint.whole import put_positions_back, set_positions_aside
from lightning_parallel.strategies.data.loaders import resume
from lightning_parallel.strategies.data.randomness import RankRandomness, keep_randomness, kept_randomness
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.techniques.step import Step

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
    def keep(checkpoint: dict[str, Any], device: torch.device, step: Step, host: dist.ProcessGroup) -> None:
        """Writes into a checkpoint what a run that goes on from it takes up. All ranks must call."""
        said = gather_objects((RankRandomness.now(device), step.findings), host)
        keep_randomness(checkpoint, [randomness for randomness, _ in said])
        checkpoint[FINDINGS] = sorted(frozenset().union(*(findings for _, findings in said)))
        set_positions_aside(checkpoint)

    def loaded(self, checkpoint: dict[str, Any], fitting: bool, rank: int) -> None:
        """A checkpoint has been read, by which the trainer's loops will stand where they stood."""
        put_positions_back(checkpoint)
        self._resumes = fitting and not self.wrote and "loops" in checkpoint  # not from weights alone
        self._random = kept_randomness(checkpoint, rank) if self._resumes else None
        self._findings = frozenset(checkpoint.get(FINDINGS, ()) if self._resumes else ())

    def begin(self, trainer: Trainer, device: torch.device, step: Step) -> None:
        """The loops are about to run."""
        step.recall(self._findings)
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
