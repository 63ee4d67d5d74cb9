"""Changes of the user's trainer for the time of a run, where Lightning has no seam for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies.checkpoint.saver import Saver
from lightning_parallel.strategies.data.batches import Batches
from lightning_parallel.strategies.data.randomness import RandomState
from lightning_parallel.strategies.lightning_package import VERSION as LIGHTNING
from lightning_parallel.strategies.lightning_package import Callback, ModelCheckpoint, Trainer
from lightning_parallel.strategies.ranks.signals import Signals
from lightning_parallel.strategies.trainer.step_loggers import Full, with_full_arguments


class TrainerPatches:
    """The patches of one run's trainer.

    Args:
        trainer: of the run.
        back: gets what takes them back, however the run ends.
    """

    def __init__(self, trainer: Trainer, back: ExitStack) -> None:
        self._trainer, self._back = trainer, back
        self.signals: Signals | None = None
        #: whether Lightning has installed its signal handlers and the loops run
        self.begun = False
        #: whether the user wants data divided by rank
        self.divides_data = internals.divides_data(trainer)
        self._back.callback(internals.leave_samplers_alone(trainer))
        for loop in internals.evaluation_loops(trainer):
            self._back.callback(setattr, loop, "inference_mode", loop.inference_mode)
            loop.inference_mode = False  # sharded parameters and inference tensors do not mix
        self._back.callback(internals.skip_without_draws(trainer, lambda: RandomState.now().replayed()))

    def ignore_sync_dist_warning(self) -> None:
        """Lightning recommends sync_dist wherever there is a process group, even of one rank."""
        warnings.filterwarnings("ignore", ".*sync_dist=True.*")
        entry = warnings.filters[0]
        filters: list[Any] = warnings.filters  # type: ignore[assignment]
        self._back.callback(lambda: filters.remove(entry) if entry in filters else None)

    def call_first(self, callback: Callback) -> None:
        """Call the callback before all others."""
        internals.callbacks_of(self._trainer).insert(0, callback)

        def dismiss() -> None:
            callbacks = internals.callbacks_of(self._trainer)
            if callback in callbacks:  # Lightning's Tuner puts another list in the place of that one
                callbacks.remove(callback)

        self._back.callback(dismiss)

    def save_checkpoints_by(self, saver: Saver) -> None:
        """Let the saver make links to last checkpoints, and know the callbacks whose checkpoints it removes."""
        found = self._trainer.checkpoint_callbacks
        saver.callbacks = [callback for callback in found if isinstance(callback, ModelCheckpoint)]
        for callback in saver.callbacks:
            self._back.callback(internals.link_by(callback, saver.link))

    def show_full_to_loggers(self, in_step: Callable[[], bool], full: Full) -> None:
        """Let the trainer's loggers get full tensors from the user's step; see `with_full_arguments`."""
        for logger in self._trainer.loggers:
            self._back.callback(setattr, logger, "__class__", type(logger))
            logger.__class__ = with_full_arguments(type(logger), in_step, full)

    def keep_ranks_together(self, agree: Callable[[bool], bool], batches: Batches, host: dist.ProcessGroup) -> None:
        """Let ranks decide together what Lightning lets each decide by its own.

        Args:
            agree: returns what rank 0 decided, by its clock.
            batches: compare the numbers of loaders that ranks are about to set up.
            host: all ranks.
        """
        self._back.callback(internals.agree_when_to_validate(self._trainer, agree))
        internals.compare_validating(self._trainer, batches.compare_loaders)
        for loop in (self._trainer.fit_loop, *internals.evaluation_loops(self._trainer)):
            self._back.callback(internals.compare_loaders(loop, host, batches.compare_loaders))

    def normalise_over(self, group: dist.ProcessGroup) -> None:
        """Let synchronised batch norms combine the ranks that read other samples, not those that hold other layers."""
        for norm in self._trainer.lightning_module.modules():
            if isinstance(norm, nn.SyncBatchNorm) and norm.process_group is None:
                norm.process_group = group
                self._back.callback(setattr, norm, "process_group", None)

    def begin(self, distributed: bool) -> None:
        """Lightning has installed its signal handlers, and the loops are about to run."""
        self.begun = True
        if distributed:
            self.signals = Signals(self._trainer)
            self._back.callback(self.signals.close)
            self._back.callback(internals.leave_sigterm_alone(self._trainer))

    def require_begun(self, stepped: bool) -> None:
        """Raise if a run stepped and Lightning never said that it begins, on which signals and resuming depend."""
        if stepped and not self.begun:
            raise RuntimeError(
                f"Lightning {LIGHTNING} does not call strategy.barrier('run-stage') before a run, by which "
                "signals are taken over and loaders resumed; install the version that lightning_parallel requires"
            )
