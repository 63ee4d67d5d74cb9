"""The strategy's own callback, for moments at which Lightning calls callbacks but no strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies.data.batches import Batches
from lightning_parallel.strategies.lightning_package import (
    BasePredictionWriter,
    Callback,
    LightningModule,
    ModelCheckpoint,
    Trainer,
)

log = logging.getLogger(__name__)


class MeshCallback(Callback):
    """Stands first among the trainer's callbacks for the time of a run.

    Args:
        batches: on which ranks agree.
        others_come: returns whether all ranks are there for what this one is about to do, though it handles an
            exception.
        unite_buffers: gives all ranks the same buffers; all must call.
        unite_metrics: gives the ranks of a pipeline the same metrics; all must call.
        begin_validation: divides a model that is not yet divided.
    """

    def __init__(
        self,
        batches: Batches,
        others_come: Callable[[str], bool],
        unite_buffers: Callable[[], None],
        unite_metrics: Callable[[], None],
        begin_validation: Callable[[], None],
    ) -> None:
        self._batches, self._others_come = batches, others_come
        self._unite_buffers, self._unite_metrics = unite_buffers, unite_metrics
        self._begin_validation, self._patched, self._finetuned = begin_validation, ExitStack(), ExitStack()
        self._hidden: list[Callback] = []

    # Lightning calls every hook of a callback in every step, and none that is None
    on_train_batch_end: Any = None
    on_before_backward: Any = None
    on_after_backward: Any = None
    on_before_optimizer_step: Any = None
    on_before_zero_grad: Any = None

    def join(self, trainer: Trainer) -> None:
        """Join callbacks that were put in the place of the trainer's, too, as Lightning's Tuner does."""
        if self not in internals.callbacks_of(trainer):
            internals.callbacks_of(trainer).append(self)  # Lightning's Tuner reads the first

    def close(self, trainer: Trainer) -> None:
        """The run is over, wherever it stood."""
        self._finetuned.close()
        self._patched.close()
        self.on_predict_batch_end(trainer)

    # ---------------------------------------------------------------- before a pass over the data

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Come before the validation of the fit reads its loaders."""

        def before_validation(combined: Any) -> None:
            self._begin_validation()
            self._batches.begin_pass(combined)

        self._patched.callback(internals.before_validation_reads(trainer, before_validation))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The loops run from here."""
        if self._batches.first_pass is not None:
            self._batches.first_pass.loop_has_made_loaders()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let samplers on all ranks draw from the same state, before the loader's iterator is made."""
        self._batches.begin_pass(internals.combined_of(trainer.fit_loop))
        self._finetuned.callback(internals.find_parameters_by_identity(internals.callbacks_of(trainer)))

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
        """Drop predictions for samples that do not count."""
        self._batches.end()
        self._batches.drop_uncounted_predictions(trainer.predict_loop)

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        """Come before `ModelCheckpoint`, which says that it saved a checkpoint whatever became of it."""
        found = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        saving = [each for each in found if each.save_on_exception]
        if saving and not self._others_come("save_checkpoint"):
            log.warning("No checkpoint of this exception: the parts of other ranks are missing, for not all came to it")
            for each in saving:
                self._patched.callback(setattr, each, "save_on_exception", True)
                each.save_on_exception = False
