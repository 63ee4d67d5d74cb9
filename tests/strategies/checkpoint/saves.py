"""A small model whose checkpoints hold what users save, and callbacks that save on the way."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_parallel.checkpoint import folder
from lightning_parallel.checkpoint.files import Damaged
from lightning_parallel.checkpoint.folder import read_manifest
from lightning_parallel.strategies.checkpoint.reading import AtomicCheckpointIO
from tests.checkpoint.folders import load
from tests.trainers import trainer

FORMS = ("full", "sharded")
FEW_WARNINGS = ("exists and is not empty", "called without a model", "multiple `ModelCheckpoint`", "no last checkpoint")


class Tied(LightningModule):
    """Tied weights, a buffer, a metric that is saved, and hyperparameters."""

    def __init__(self, width: int = 6, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(9, width), nn.Linear(width, 9, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.metric = MeanMetric()
        self.metric.persistent(True)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.head(self.table(batch[0])), batch[0])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        loss = self.loss(batch)
        self.metric.update(loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def tokens() -> DataLoader:
    """Four batches on one device."""
    return DataLoader(TensorDataset(torch.arange(16) % 9), 4)


def fitted(make: Callable[[], Any], model: LightningModule, **run: Any) -> Trainer:
    """The trainer after an epoch."""
    for text in FEW_WARNINGS:
        warnings.filterwarnings("ignore", f".*{text}")
    made = trainer(make(), **({"max_epochs": 1} | run))
    made.fit(model, tokens(), tokens())
    return made


class SaveAt(Callback):
    """Saves `N.ckpt` after the N-th batch, wherever in an epoch that is."""

    def __init__(self, folder: Path, batches: list[int]) -> None:
        self.folder, self.batches, self.done = folder, batches, 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.done += 1
        if self.done in self.batches:
            trainer.save_checkpoint(self.folder / f"{self.done}.ckpt")


class SaveAtEnd(Callback):
    """Saves at the end of the first epoch, where ModelCheckpoint does unless told otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder / "end_of_epoch.ckpt")


def content(path: Path) -> dict[str, Any]:
    """All that is in a checkpoint of either form."""
    return load(path) if path.is_dir() else torch.load(path, weights_only=True)


def valid_in(where: Path) -> set[str]:
    """The names of the valid checkpoints in a folder; a damaged one that stays there is a failure."""
    found = set()
    for path in [path for path in where.iterdir() if not path.name.startswith(".")] if where.exists() else []:
        try:
            if path.is_dir():
                folder.require_no_faults(path, folder.faults(path, read_manifest(path)))
            else:
                AtomicCheckpointIO().load_checkpoint(path)
        except (OSError, Damaged):
            assert not path.exists(), path  # it is being removed
            continue
        found.add(path.name)
    return found
