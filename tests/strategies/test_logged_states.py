"""What is logged of states that all ranks share: gradients that a step has made, collections of metrics."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_parallel.techniques.zero.sharded import parameters
from tests.layouts import layouts
from tests.ranks import begun_on_one, run_on_ranks
from tests.tiers import covering, sampled
from tests.trainers import trainer

MakeStrategy = Callable[[], Any]


class Logging(LightningModule):
    """Logs numbers made of the gradients of a backward that its step has run."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for layer in self.layers:
            batch = batch + layer(batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(batch.square().mean())
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.log("squares", sum((each * each).sum() for each in gradients))
        self.log("norm", torch.stack([each.norm() for each in gradients]).norm())
        self.log("largest", torch.stack([each.abs().max() for each in gradients]).max())
        self.log("number", float(gradients[0].square().sum()))
        optimizer.step()

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD(self.parameters(), lr=0.1)


class Kept(Callback):
    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.found.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def logged(
    batch: int, make_strategy: MakeStrategy | None = None, unit_bytes: int = parameters.UNIT_BYTES
) -> list[dict[str, float]]:
    parameters.UNIT_BYTES, before = unit_bytes, parameters.UNIT_BYTES
    torch.manual_seed(0)
    kept, module, data = Kept(), Logging(), torch.randn(24, 6, dtype=torch.float64)
    run: Any = {"max_epochs": 1, "precision": "64-true", "callbacks": [kept]}
    trainer("auto" if make_strategy is None else make_strategy(), **run).fit(module, DataLoader(data, batch))
    parameters.UNIT_BYTES = before
    assert "grad" not in vars(nn.Parameter)  # nobody looks any more
    return kept.found


LAYOUTS = layouts("data parallel", "zero 1", "zero 2", "zero 3", "tensor x zero 3")


@sampled(1, "layout", LAYOUTS)
def test_sums_over_gradients_are_those_of_one_device(layout: str) -> None:
    ranks, _, strategy = LAYOUTS[layout]
    expected = begun_on_one(logged, 4)
    for got in run_on_ranks(ranks, logged, 2, strategy):
        assert got == [pytest.approx(each, rel=1e-9) for each in expected.result()]


@sampled(1, "layout", ["zero 3", "tensor x zero 3"])
def test_so_they_are_where_all_parameters_are_in_units(layout: str) -> None:
    ranks, _, strategy = LAYOUTS[layout]
    expected = begun_on_one(logged, 4)
    for got in run_on_ranks(ranks, logged, 2, strategy, unit_bytes=64):
        assert got == [pytest.approx(each, rel=1e-9) for each in expected.result()]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Collecting(LightningModule):
    """Two metrics that have equal states until a sample is right for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scale() for _ in range(2))
        self.metrics = MetricCollection({"first": MulticlassAccuracy(4), "two": MulticlassAccuracy(4, top_k=2)})

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits, labels = batch
        for block in self.blocks:
            logits = block(logits)
        self.count(logits, labels)

    def count(self, *batch: Tensor) -> None:
        self.metrics.update(*batch)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.metrics.compute())
        self.metrics.reset()


class Calling(Collecting):
    """Calls them, which counts too, and asks for no states."""

    def count(self, *batch: Tensor) -> None:
        self.metrics(*batch)

    def on_validation_epoch_end(self) -> None:
        assert not self.metrics._groups_checked
        super().on_validation_epoch_end()


def validated(kind: type[Collecting], batch: int, make_strategy: MakeStrategy | None = None) -> dict[str, float]:
    places = [3, 1, 3, 0, 2, 1, 0, 1]  # of the label among the classes, by their logits
    samples = [(torch.arange(4.0), torch.tensor(3 - place)) for place in places]
    module = kind()
    run = trainer("auto" if make_strategy is None else make_strategy())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*sync_dist=True")  # of one process in a group
        run.validate(module, DataLoader(samples, batch), verbose=False)  # type: ignore[arg-type]
    assert vars(module.metrics).keys().isdisjoint(("_equal_metric_states", "_merge_compute_groups"))
    return {name: float(value) for name, value in run.callback_metrics.items()}


READERS = layouts("data parallel", "pipeline of 4 microbatches", "pipeline x data parallel")


@covering(keep=1, layout=READERS, kind=[Collecting, Calling])
def test_metrics_of_a_collection_are_those_of_one_device(layout: str, kind: type[Collecting]) -> None:
    ranks, readers, strategy = READERS[layout]
    expected = begun_on_one(validated, kind, 4)
    for got in run_on_ranks(ranks, validated, kind, 4 // readers, strategy):
        assert got == expected.result() == {"first": 0.25, "two": 0.5}
