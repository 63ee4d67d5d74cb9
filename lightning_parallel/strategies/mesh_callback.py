"""What must happen on all ranks at moments for which Lightning has callback hooks but no strategy hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging

from lightning_parallel.strategies.batches import Batches

NEED_WHOLE_PARAMETERS: tuple[type[Callback], ...] = (ModelPruning, StochasticWeightAveraging, WeightAveraging)


class MeshCallback(Callback):
    """Stands first among the trainer's callbacks for the time of a run."""

    def __init__(self, batches: Batches, share_randomness: Callable[[], None]) -> None:
        self._batches = batches
        self._share_randomness = share_randomness

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before the loader's iterator is made: samplers on all ranks draw from the same state."""
        self._share_randomness()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Ranks agree on what they got."""
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        self._batches.begin(trainer.fit_loop._combined_loader, batch, batch_idx, 0, is_last)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Ranks agree on what they got."""
        loop = trainer.fit_loop.epoch_loop.val_loop if trainer.state.fn == "fit" else trainer.validate_loop
        self._begin(loop, batch, batch_idx, dataloader_idx)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Ranks agree on what they got."""
        loop = trainer.test_loop
        self._begin(loop, batch, batch_idx, dataloader_idx)

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Ranks agree on what they got."""
        loop = trainer.predict_loop
        self._begin(loop, batch, batch_idx, dataloader_idx)

    def _begin(self, loop: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self._batches.begin(loop._combined_loader, batch, batch_idx, dataloader_idx, loop.batch_progress.is_last_batch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Epoch values are reduced here, on all ranks at once, before anything reads them on one of them."""
        self._batches.end(trainer.fit_loop._combined_loader)
        _ = trainer.callback_metrics

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Predictions for samples that do not count are dropped."""
        self._batches.drop_uncounted_predictions(trainer.predict_loop)


def refuse_callbacks(callbacks: list[Callback], parameters_are_sharded: bool) -> None:
    """Raises for a callback that would train something else on sharded parameters, by its name."""
    for callback in callbacks:
        if parameters_are_sharded and isinstance(callback, NEED_WHOLE_PARAMETERS):
            raise ValueError(
                f"{type(callback).__name__} reads and writes whole parameters, but this strategy shards them; "
                "use Zero(stage=2) or DataParallel(), which keep parameters whole"
            )
