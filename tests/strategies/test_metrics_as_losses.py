"""A loss that is the value of a torchmetrics metric trains the weights of one device."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError, Metric, MetricCollection

from tests.curves import compare_weights
from tests.layouts import layouts
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, made
from tests.trainers import trainer


class MeanError(Metric):
    """The mean absolute error, from a sum and a count."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, guesses: Tensor, targets: Tensor) -> None:
        self.total = self.total + (guesses - targets).abs().sum()
        self.count = self.count + targets.numel()

    def compute(self) -> Tensor:
        return self.total / self.count


class ListedError(Metric):
    """The mean absolute error, from a list of errors, by two updates a call."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("errors", [], dist_reduce_fx="cat")

    def update(self, guesses: Tensor, targets: Tensor) -> None:
        self.errors.append((guesses - targets).abs().flatten())

    def compute(self) -> Tensor:
        errors = self.errors
        return (torch.cat(errors) if isinstance(errors, list) else errors).mean()


class Nested(Metric):
    """Half of another metric's value."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = MeanError()

    def update(self, guesses: Tensor, targets: Tensor) -> None:
        self.inner.update(guesses, targets)

    def compute(self) -> Tensor:
        return self.inner.compute() / 2

    def forward(self, guesses: Tensor, targets: Tensor) -> Tensor:
        return self.inner(guesses, targets) / 2


class Trained(LightningModule):
    """Its loss is a sum of metrics' values; one of them is also logged as a metric, and one is computed by hand."""

    def __init__(self, computes: bool) -> None:
        super().__init__()
        self.computes = computes
        torch.manual_seed(3)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
        self.loss, self.listed, self.nested = MeanError(), ListedError(), Nested()
        self.both = MetricCollection({"mean": MeanError(), "mse": MeanSquaredError()})
        self.scale = MeanError()

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


def fitted(strategy: MakeStrategy | None, readers: int, computes: bool) -> Any:
    module, random = Trained(computes), torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(21, 4, generator=random).double() for _ in range(2)))  # 8, 8 and 5 samples
    run = trainer(made(strategy), max_epochs=2, precision="64-true", log_every_n_steps=1)
    run.fit(module, DataLoader(data, 8 // readers))
    return module.state_dict(), {name: float(value) for name, value in run.callback_metrics.items()}


LAYOUTS = layouts("data parallel", "zero 1", "zero 2", "tensor x zero 3", "pipeline")


@pytest.mark.parametrize(("ranks", "readers", "strategy"), LAYOUTS.values(), ids=LAYOUTS)
def test_losses_of_metrics_train_as_on_one_device(ranks: int, readers: int, strategy: MakeStrategy) -> None:
    computes = readers > 1  # a value of all batches so far, in a pipeline of all microbatches
    expected = begun_on_one(fitted, None, 1, computes)
    for rank, (weights, logged) in enumerate(run_on_ranks(ranks, fitted, strategy, readers, computes)):
        compare_weights(expected.result()[0], weights, 1e-6, where=f"rank {rank}: ")
        wanted = dict(expected.result()[1])
        if readers == 1:  # the step value of a metric in a pipeline is that of the last microbatch
            wanted["errors_step"] = logged["errors_step"]
        assert logged == pytest.approx(wanted, rel=1e-6)
