"""Changes of the user's trainer for a run: made at its start, taken back at its end, however it ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_parallel.strategies.checkpoint.saver import Saver
from lightning_parallel.strategies.data.randomness import RandomState
from lightning_parallel.strategies.lightning_package import VERSION as LIGHTNING
from lightning_parallel.strategies.lightning_package import Callback, ModelCheckpoint, Trainer
from lightning_parallel.strategies.ranks.signals import Signals
from lightning_parallel.strategies.trainer import lightnings
from lightning_parallel.strategies.trainer.step_loggers import Full, with_full_arguments


class Adoption:
    """A trainer whose loops and loaders are the strategy's for one run.

    Args:
        trainer: the user's.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._back = trainer, ExitStack()
        self.signals: Signals | None = None
        #: whether Lightning has installed its signal handlers, and the loops run
        self.begun = self.stepped = False
        #: whether the user wants data divided by rank
        self.divides_data = lightnings.divides_data(trainer)
        lightnings.let_divide_data(trainer, False)  # Lightning's would replace the user's sampler and order
        self._back.callback(lightnings.let_divide_data, trainer, self.divides_data)
        for loop in _evaluating(trainer):
            self._back.callback(setattr, loop, "inference_mode", loop.inference_mode)
            loop.inference_mode = False  # sharded parameters and inference tensors do not mix
        self._back.callback(lightnings.skip_without_draws(_evaluating(trainer)[0], RandomState.preserved))

    def be_silent_on_syncing(self) -> None:
        """Lightning recommends sync_dist wherever there is a process group, even of one rank."""
        warnings.filterwarnings("ignore", ".*sync_dist=True.*")
        self._back.callback(_forget, warnings.filters[0])

    def call_first(self, callback: Callback) -> None:
        """Has the callback called before all others."""
        lightnings.callbacks_of(self._trainer).insert(0, callback)
        self._back.callback(self._dismiss, callback)

    def save_checkpoints_by(self, saver: Saver) -> None:
        """Has the saver make links to last checkpoints, and know the callbacks whose checkpoints it removes."""
        found = self._trainer.checkpoint_callbacks
        saver.callbacks = [callback for callback in found if isinstance(callback, ModelCheckpoint)]
        for callback in saver.callbacks:
            lightnings.link_by(callback, saver.link)
            self._back.callback(lightnings.link_itself, callback)

    def show_full_to_loggers(self, in_step: Callable[[], bool], full: Full) -> None:
        """Has the trainer's loggers get full tensors from the user's step; see `with_full_arguments`."""
        for logger in self._trainer.loggers:
            self._back.callback(setattr, logger, "__class__", type(logger))
            logger.__class__ = with_full_arguments(type(logger), in_step, full)

    def _dismiss(self, callback: Callback) -> None:
        with suppress(ValueError):  # another list stands in the place of that one
            lightnings.callbacks_of(self._trainer).remove(callback)

    def keep_ranks_together(self, agree: Callable[[bool], bool], compare: Callable[[str, int | str], None]) -> None:
        """Makes ranks decide together what Lightning lets each decide by its own.

        Args:
            agree: what rank 0 decided, by its clock.
            compare: gets the name and the number of the loaders that a loop is about to set up, or whether it will.
        """
        lightnings.agree_when_to_validate(self._trainer, agree)
        self._back.callback(lightnings.decide_alone, self._trainer)
        lightnings.compare_validating(self._trainer, compare)
        for loop in (self._trainer.fit_loop, *_evaluating(self._trainer)):
            lightnings.compare_loaders(loop, compare)
            self._back.callback(lightnings.take_loaders_unseen, loop)

    def normalise_over(self, group: dist.ProcessGroup) -> None:
        """Synchronised batch norms meet the ranks that read other samples, and not those that hold other layers."""
        norms = (part for part in self._trainer.lightning_module.modules() if isinstance(part, nn.SyncBatchNorm))
        for norm in [norm for norm in norms if norm.process_group is None]:
            norm.process_group = group
            self._back.callback(setattr, norm, "process_group", None)

    def begin(self, distributed: bool) -> None:
        """Lightning has installed its signal handlers, and the loops are about to run."""
        self.begun = True
        if distributed:
            self.signals = Signals(self._trainer)
            self._back.callback(self.signals.close)

    def require_begun(self) -> None:
        """Raises if Lightning never said that a run begins: signals and resuming hang on it.

        To be asked at the end: Lightning's Tuner runs steps before.
        """
        if self.stepped and not self.begun:
            raise RuntimeError(
                f"Lightning {LIGHTNING} does not call strategy.barrier('run-stage') before a run, by which "
                "signals are taken over and loaders resumed; install the version that lightning_parallel requires"
            )

    def close(self) -> None:
        """Gives everything back."""
        self._back.close()


def _evaluating(trainer: Trainer) -> tuple[Any, ...]:
    """The loops that evaluate; that of a fit comes first."""
    return trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop


def _forget(entry: object) -> None:
    filters: list[object] = warnings.filters  # type: ignore[assignment]
    if entry in filters:
        filters.remove(entry)
