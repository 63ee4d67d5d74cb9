"""One small run of a Trainer, on one device or on a mesh, and what it leaves; for tests of data and logging.

`on_device(run, ...)` is Lightning's own single-device Trainer: the reference. `on_ranks(n, run, strategy, ...)` is the
same run under one of our strategies; what a rank `saw` are the numbers of the samples of each of its batches.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from tests.curves import compare_weights
from tests.ranks import begun_on_one, on_one, run_on_ranks
from tests.trainers import trainer

MakeStrategy = Callable[[], Strategy]


class Samples(Dataset):
    """Sample i: its number, two features and a target."""

    def __init__(self, size: int) -> None:
        random = torch.Generator().manual_seed(3)
        self.features = torch.randn(size, 2, generator=random)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.features[index], self.features[index].sum().tanh()


class Watched(LightningModule):
    """A linear model that notes which samples it sees."""

    def __init__(self, loaders: dict[str, Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layer = nn.Linear(2, 1)
        self.metric = MeanMetric()
        self.saw: dict[str, list[list[int]]] = {}
        self.loaders = loaders or {}

    def loss(self, stage: str, batch: Any) -> Tensor:
        numbers, features, targets = batch
        self.saw.setdefault(stage, []).append(numbers.tolist())
        return (self.layer(features).squeeze(-1) - targets).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch.values() if isinstance(batch, dict) else [batch]
        loss = torch.stack([self.loss("train", part) for part in parts if part is not None]).sum()
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(next(iter(parts))[0]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.evaluate(f"val{dataloader_idx}", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.evaluate(f"test{dataloader_idx}", batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.loss(f"predict{dataloader_idx}", batch)
        return batch[0]

    def evaluate(self, stage: str, batch: Any) -> Tensor:
        loss = self.loss(stage, batch)
        self.metric.update(loss, len(batch[0]))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("metric", self.metric)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Steps(Callback):
    """Notes the value of each training step and what is known after each epoch."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.epochs: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.steps.append(float(trainer.callback_metrics.get("train_loss_step", 0.0)))

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self.note(trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.note(trainer)

    def note(self, trainer: Trainer) -> None:
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@dataclass
class Run:
    """What is left of a run on one rank."""

    saw: dict[str, list[list[int]]] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    epochs: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    result: Any = None


def fit(strategy: Strategy | str, make_loaders: Callable[..., Any], batch_size: int, **options: Any) -> Run:
    """Fits a watched model on the loaders (training, and validation if there are two)."""
    seed_everything(5, verbose=False)
    module, steps = Watched(), Steps()
    loaders = make_loaders(batch_size)
    loaders = loaders if isinstance(loaders, tuple) else (loaders,)
    fitted = trainer(strategy, callbacks=[steps, *options.pop("callbacks", [])], **({"max_epochs": 2} | options))
    fitted.fit(module, *loaders)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return Run(module.saw, steps.steps, steps.epochs, weights)


def on_device(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The run by Lightning's own single-device Trainer."""
    return on_one(with_strategy, run, None, *args, **options)


def on_ranks(n: int, run: Callable[..., Any], strategy: MakeStrategy, *args: Any, **options: Any) -> list[Any]:
    """The run under a strategy of ours, with the result of each rank."""
    return run_on_ranks(n, with_strategy, run, strategy, *args, **options)


def with_strategy(run: Callable[..., Any], strategy: MakeStrategy | None, *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)  # advice on shuffling, workers and what is not defined
        return run("auto" if strategy is None else strategy(), *args, **options)


def check_fit(
    n: int, strategy: MakeStrategy, make_loaders: Callable[..., Any], batch_size: int = 2, **options: Any
) -> None:
    """Holds a fit on n ranks to one device with n times the batch size: samples, values, weights."""
    begun = begun_on_one(with_strategy, fit, None, make_loaders, n * batch_size, **options)
    runs = on_ranks(n, fit, strategy, make_loaders, batch_size, **options)
    expected = begun.result()
    require_same_samples(expected.saw, [run.saw for run in runs])
    for run in runs:
        require_same_values(expected, run)


def require_same_values(expected: Run, run: Run) -> None:
    assert run.steps == pytest.approx(expected.steps, rel=1e-5, abs=1e-7)
    assert len(run.epochs) == len(expected.epochs)
    for wanted, found in zip(expected.epochs, run.epochs, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-7)
    compare_weights(expected.weights, run.weights, 1e-5)


def require_same_samples(expected: dict[str, list[list[int]]], saw: list[dict[str, list[list[int]]]]) -> None:
    """Each global batch, put together in the order of the ranks, is the one device's; a rank may repeat its first."""
    for stage, batches in expected.items():
        together = [
            [number for part in parts for number in part] for parts in zip(*(s[stage] for s in saw), strict=True)
        ]
        assert len(together) == len(batches), stage
        for wanted, found in zip(batches, together, strict=True):
            assert found[: len(wanted)] == wanted, stage
            assert set(found[len(wanted) :]) <= {wanted[0]}, stage


def flat(parts: Iterable[Iterable[Any]]) -> list[Any]:
    return [value for part in parts for value in part]


def loader(size: int, batch_size: int, **options: Any) -> DataLoader:
    return DataLoader(Samples(size), batch_size, **options)
