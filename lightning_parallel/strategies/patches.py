"""Loggers that the user's step calls itself: `self.logger.experiment.add_histogram("logits", logits, step)`.

Loggers act on rank 0 only, and read tensors there. In a step of tensor, context or expert parallelism each rank has
parts of tensors, and to read one all ranks must come. So while a step runs, calls of a logger and of its experiment
first make their arguments full, on every rank, whether the logger then writes or not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies.checkpoint.saver import Saver
from lightning_parallel.strategies.data.batches import Batches
from lightning_parallel.strategies.data.randomness import RandomState
from lightning_parallel.strategies.lightning_package import VERSION as LIGHTNING
from lightning_parallel.strategies.lightning_package import Callback, ModelCheckpoint, Trainer
from lightning_parallel.strategies.ranks.failures import Signals

Full = Callable[[str, Any], Any]
"""Makes arguments full; gets the name of what is called, for errors. All ranks whose step runs call it."""


def with_full_arguments(kind: type[Any], in_step: Callable[[], bool], full: Full) -> type[Any]:
    """A subclass of a class of loggers whose methods, and those of its experiment, get full tensors in a step.

    Loggers act on rank 0 only, and read tensors there: `self.logger.experiment.add_histogram("logits", logits, step)`.
    In a step of tensor, context or expert parallelism each rank has shards, and to read one all ranks must come. So
    these calls first make their arguments full, on every rank, whether the logger then writes or not.

    Args:
        kind: the class of a logger.
        in_step: whether a step of the user's runs.
        full: see `Full`.
    """

    def get(self: Any, name: str) -> Any:
        value = super(made, self).__getattribute__(name)
        if name.startswith("_") or not in_step():
            return value
        if name == "experiment":
            return _Experiment(value, full)
        return _full_call(value, f"{kind.__name__}.{name}", full) if callable(value) else value

    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__getattribute__": get}
    made: type[Any] = type(kind.__name__, (kind,), named)
    return made


class _Experiment:
    """The experiment of a logger, or the stand-in that other ranks have, while a step runs."""

    def __init__(self, experiment: Any, full: Full) -> None:
        vars(self).update(_experiment=experiment, _full=full)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experiment, name)
        return _full_call(value, f"experiment.{name}", self._full) if callable(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._experiment, name, self._full(f"experiment.{name}", value))

    def __getitem__(self, key: Any) -> Any:  # as in neptune: experiment["loss"].append(value)
        return _Experiment(self._experiment[key], self._full)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._experiment[key] = self._full(f"experiment[{key!r}]", value)


def _full_call(function: Callable[..., Any], name: str, full: Full) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = full(name, (args, kwargs))
        return function(*args, **kwargs)

    return call


class TrainerPatches:
    """The patches of one run's trainer.

    Args:
        trainer: of the run.
        back: gets what takes them back, however the run ends.
    """

    def __init__(self, trainer: Trainer, back: ExitStack) -> None:
        self._trainer, self._back = trainer, back
        self.signals = Signals(trainer)
        #: whether Lightning has installed its signal handlers and the loops run
        self.begun = False
        #: whether the user wants data divided by rank
        self.divides_data = internals.divides_data(trainer)
        internals.leave_samplers_alone(trainer, back)
        for loop in internals.evaluation_loops(trainer):
            self._back.callback(setattr, loop, "inference_mode", loop.inference_mode)
            loop.inference_mode = False  # sharded parameters and inference tensors do not mix
        internals.skip_without_draws(trainer, lambda: RandomState.now().replayed(), back)

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
            internals.link_by(callback, saver.link, self._back)

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
        internals.agree_when_to_validate(self._trainer, agree, self._back)
        internals.compare_validating(self._trainer, batches.compare_loaders)
        for loop in (self._trainer.fit_loop, *internals.evaluation_loops(self._trainer)):
            internals.compare_loaders(loop, host, batches.compare_loaders, self._back)

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
            self.signals.install()
            self._back.callback(self.signals.close)
            internals.leave_sigterm_alone(self._trainer, self._back)

    def require_begun(self, stepped: bool) -> None:
        """Raise if a run stepped and Lightning never said that it begins, on which signals and resuming depend."""
        if stepped and not self.begun:
            raise RuntimeError(
                f"Lightning {LIGHTNING} does not call strategy.barrier('run-stage') before a run, by which "
                "signals are taken over and loaders resumed; install the version that lightning_parallel requires"
            )
