"""Losses that loops over samples compute, of which there are other numbers on other ranks, and values of metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric, MetricCollection

from tests.heard import heard
from tests.layouts import layouts
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, made, require_like
from tests.tiers import sampled
from tests.trainers import trainer


class Loops(LightningModule):
    """The mean over samples of the mean over each sample's targets, of which samples have 1 to 6."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(5, 4)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        losses = [F.cross_entropy(self.net(x), y) for x, y, _ in zip(*batch, strict=True)]
        self.log("loss", loss := torch.stack(losses).mean(), on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class OfSources(Loops):
    """Beside its loss, it computes the loss of some samples, which some batches lack: that may differ between ranks."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x, target, task = batch
        logits, source = self.net(x).flatten(0, 1), (task == 0).repeat_interleave(6)
        with torch.no_grad():
            target = target.flatten()
            self.log("source", F.cross_entropy(logits[source], target[source]) if source.any() else 0.0)
        self.log("loss", loss := F.cross_entropy(logits, target), on_step=True, on_epoch=True)
        return loss


def looped(kind: type[Loops], strategy: MakeStrategy | None, readers: int) -> Any:
    random = torch.Generator().manual_seed(1)
    targets = torch.randint(4, (22, 6), generator=random)
    for sample, row in enumerate(targets):
        row[1 + sample % 6 :] = -100
    tasks = torch.tensor(([0, 0, 1, 1, 1, 2, 2, 2] * 3)[:22])  # rank 0 has others than rank 1
    # the last of three batches is smaller
    data = TensorDataset(torch.randn(22, 6, 5, generator=random).double(), targets, tasks)
    model, run = kind(), trainer(made(strategy), max_epochs=1, precision="64-true")
    with heard() as lines:
        run.fit(model, DataLoader(data, batch_size=8 // readers))
    assert kind is Loops or not any("losses" in line for line in lines)
    return {**model.state_dict(), "loss": run.callback_metrics["loss_epoch"].double()}


class ListedError(Metric):
    """The mean absolute error, from a list of errors, by two updates a call."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("errors", [], dist_reduce_fx="cat")

    def update(self, guesses: Tensor, targets: Tensor) -> None:
        self.errors.append((guesses - targets).abs().flatten())

    def compute(self) -> Tensor:
        return (torch.cat(self.errors) if isinstance(self.errors, list) else self.errors).mean()


class Nested(Metric):
    """Half of another metric's value."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = MeanAbsoluteError()

    def update(self, guesses: Tensor, targets: Tensor) -> None:
        self.inner.update(guesses, targets)

    def compute(self) -> Tensor:
        return self.inner.compute() / 2

    def forward(self, guesses: Tensor, targets: Tensor) -> Tensor:
        return self.inner(guesses, targets) / 2


class OfMetrics(LightningModule):
    """Its loss is a sum of metrics' values; one of them is also logged as a metric, and one is computed by hand."""

    def __init__(self, computes: bool) -> None:
        super().__init__()
        self.computes = computes
        torch.manual_seed(3)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
        self.loss, self.listed, self.nested = MeanAbsoluteError(), ListedError(), Nested()
        self.both = MetricCollection({"mean": MeanAbsoluteError(), "mse": MeanSquaredError()})
        self.scale = MeanAbsoluteError()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        guesses, targets = self.layers(batch[0]), batch[1]
        both = self.both(guesses, targets)
        loss = self.loss(guesses, targets) + self.listed(guesses, targets) + self.nested(guesses, targets)
        loss = loss + both["mean"] + both["mse"]
        if self.computes:
            self.scale.update(guesses, targets)
            loss = loss * self.scale.compute()
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("errors", self.loss, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("listed", self.listed.compute())
        self.listed.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def of_metrics(strategy: MakeStrategy | None, readers: int, computes: bool) -> Any:
    module, random = OfMetrics(computes), torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(21, 4, generator=random).double() for _ in range(2)))  # 8, 8 and 5 samples
    run = trainer(made(strategy), max_epochs=2, precision="64-true", log_every_n_steps=1)
    run.fit(module, DataLoader(data, 8 // readers))
    values = {name: float(value) for name, value in run.callback_metrics.items()}
    if not computes:  # the step value of a metric in a pipeline is that of the last microbatch
        del values["errors_step"]
    return {**module.state_dict()}, values


def each(cases: Sequence[Any], strategy: MakeStrategy, readers: int) -> list[Any]:
    return [looped(case, strategy, readers) if case else of_metrics(strategy, readers, readers > 1) for case in cases]


LAYOUTS = layouts("data parallel", "zero 2", "tensor x zero 3", "pipeline")


@sampled(2, "layout", LAYOUTS)
def test_losses_train_as_on_one_device(layout: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    loops: list[Any] = [Loops, OfSources] if layout in ("data parallel", "zero 2") else []
    computes = readers > 1  # a value of all batches so far, in a pipeline of all microbatches
    begun = [*(begun_on_one(looped, kind, None, 1) for kind in loops), begun_on_one(of_metrics, None, 1, computes)]
    for rank, found in enumerate(run_on_ranks(ranks, each, [*loops, None], strategy, readers)):
        for number, (expected, got) in enumerate(zip(begun, found, strict=True)):
            require_like(expected.result(), got, 1e-9 if number < len(loops) else 1e-6, where=f"rank {rank}, {number}")
