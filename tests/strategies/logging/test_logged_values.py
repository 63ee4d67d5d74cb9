"""Values that steps log, in one process and on ranks: changed later, made of means, of metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

import lightning_parallel as lp
from tests.layouts import Layout, layouts
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, made, require_like
from tests.tiers import sampled
from tests.trainers import trainer

WIDTH, LENGTH, CLASSES, IGNORED = 6, 5, 4, -100


class Notes(Callback):
    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self.on_train_batch_end(trainer)


class ChangesLater(LightningModule):
    """Logs values that it changes in place afterwards, parts of parameters, and constants."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scales, self.temperature = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor(0.5))

    def forward(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch).tanh()
        return batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self(batch)
        loss = hidden.square().mean() * self.scales[0] + self.temperature * self.scales[1]
        self.log_parameters(self.temperature)
        self.log_and_change("loss", loss.detach().clone())
        self.log_and_change("mean", F.mse_loss(hidden, batch).detach())
        self.log_and_change("constant", torch.ones(()))
        weight = torch.tensor(2.0)  # as many as a rank or a microbatch has samples, by chance
        assert len(batch) == weight or len(batch) == 4
        self.log_dict({"weight of a part": weight, "part": weight * hidden.square().mean()}, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log_and_change("val_mean", F.mse_loss(self(batch), batch))
        self.log_parameters(self.temperature.detach(), "val_")

    def log_parameters(self, temperature: Tensor, prefix: str = "") -> None:
        self.log(f"{prefix}scale", self.scales[0])
        self.log(f"{prefix}temperature", temperature, on_epoch=True)
        self.log(f"{prefix}weight", self.blocks[0].weight[0, 0])

    def log_and_change(self, name: str, value: Tensor) -> None:
        self.log(name, value, on_step=True, on_epoch=True)
        value.mul_(100)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def changed_later(strategy: MakeStrategy | None, readers: int) -> Any:
    samples, notes = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).double(), Notes()
    loader, run = partial(DataLoader, batch_size=4 // readers), trainer(made(strategy), max_epochs=2, callbacks=[notes])
    run.fit(ChangesLater().double(), loader(samples), loader(samples[:8]))
    return notes.values


class Words(LightningModule):
    """Learns the targets of one head; two heads have targets of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))
        self.average = MeanMetric()
        self.returned: list[Tensor] = []

    def step(self, stage: str, batch: list[Tensor]) -> Tensor:
        x, first, second = batch
        for layer in self.layers:
            x = x + layer(x)
        logits, known = [head(x).transpose(1, 2) for head in self.heads], first != IGNORED
        loss, other = F.cross_entropy(logits[0], first), F.cross_entropy(logits[1], second)
        size = self.heads[0](batch[0]).square().mean(-1)
        values = {"loss": loss, "other": other, "detached": loss.detach(), "error": (batch[0] - 0.1).square().mean()}
        values["hits"] = lp.mean(((logits[0].argmax(1) == first) & known).sum(), known.sum())
        values["masked"] = lp.mean((size * known).sum(), known.sum())
        if loss.requires_grad:  # which tells what a sum was made of
            values |= {"twice": loss * 2, "negative": -loss, "bits": loss / math.log(2), "shared": loss + 3 * loss}
            values |= {"both": loss + 0.5 * other, "beside": loss + 0.1 * batch[0].square().mean()}
        if self.global_step % 2:
            del values["detached"]
        self.log_dict({f"{stage}_{name}": value for name, value in values.items()}, on_step=True, on_epoch=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = self.step("train", batch)
        self.average(batch[0].square().mean(), weight=len(batch[0]))
        return {"loss": loss, "bits": loss / math.log(2)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned.append(outputs["bits"].detach().clone())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step("val", batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def of_means(strategy: MakeStrategy | None, readers: int, samples: int = 24) -> Any:
    """Ever fewer targets in a sample, unlike in each batch."""
    torch.set_default_dtype(torch.float64)
    random, notes, model = torch.Generator().manual_seed(1), Notes(), Words()
    few = torch.linspace(0, 0.9, 24)[:, None]
    inputs, *targets = (
        torch.randn(24, LENGTH, WIDTH, generator=random),
        *(
            torch.randint(CLASSES, (24, LENGTH), generator=random).masked_fill(
                torch.rand(24, LENGTH, generator=random) < few, IGNORED
            )
            for _ in range(2)
        ),
    )
    data = TensorDataset(*(each[:samples] for each in (inputs, *targets)))
    loader = partial(DataLoader, data, 12 // readers)
    trainer(made(strategy), precision="64-true", max_epochs=2, callbacks=[notes]).fit(model, loader(), loader())
    return {"values": notes.values, "returned": model.returned, "average": float(model.average.compute())}


def uneven(strategy: MakeStrategy | None, readers: int) -> Any:
    """Samples that do not divide among ranks."""
    return of_means(strategy, readers, 23)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Collecting(LightningModule):
    """Two metrics that have equal states until a sample is right for one of them; calling them counts, too."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.calls, self.blocks = calls, nn.ModuleList(Scale() for _ in range(2))
        self.metrics = MetricCollection({"first": MulticlassAccuracy(4), "two": MulticlassAccuracy(4, top_k=2)})

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits, labels = batch
        for block in self.blocks:
            logits = block(logits)
        (self.metrics if self.calls else self.metrics.update)(logits, labels)

    def on_validation_epoch_end(self) -> None:
        assert not (self.calls and self.metrics._groups_checked)
        self.log_dict(self.metrics.compute())
        self.metrics.reset()


def of_collections(strategy: MakeStrategy | None, readers: int) -> Any:
    places, found = [3, 1, 3, 0, 2, 1, 0, 1], []  # of the label among the classes, by their logits
    samples = [(torch.arange(4.0), torch.tensor(3 - place)) for place in places]
    for calls in False, True:
        module, run = Collecting(calls), trainer(made(strategy))
        run.validate(module, DataLoader(samples, 4 // readers), verbose=False)
        assert vars(module.metrics).keys().isdisjoint(("_equal_metric_states", "_merge_compute_groups"))
        found.append({name: float(value) for name, value in run.callback_metrics.items()})
    assert found == 2 * [{"first": 0.25, "two": 0.5}]
    return found


Case = Callable[[MakeStrategy | None, int], Any]
RTOL: dict[Case, float] = {changed_later: 1e-6, of_means: 1e-9, uneven: 1e-9, of_collections: 0}
CASES: dict[str, list[Case]] = {
    "data parallel": [changed_later, of_means, uneven, of_collections],
    "zero 3": [changed_later, of_means],
    "zero 2": [changed_later],
    "tensor parallel": [changed_later],
    "data parallel of 3": [uneven],
    "pipeline of 4 microbatches": [of_means, of_collections],
    "pipeline over the batch": [of_means],
    "pipeline x data parallel": [of_means, of_collections],
    "pipeline": [changed_later, of_means, of_collections],
}
LAYOUTS = layouts(*(name for name in CASES if name != "data parallel of 3"))
LAYOUTS["data parallel of 3"] = Layout(3, 3, lp.DataParallelStrategy)


def each(cases: Sequence[Case], strategy: MakeStrategy, readers: int) -> list[Any]:
    return [case(strategy, readers) for case in cases]


@sampled(2, "layout", CASES)
def test_logged_values_are_those_of_one_device(layout: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    begun = [begun_on_one(case, None, 1) for case in CASES[layout]]
    for found in run_on_ranks(ranks, each, CASES[layout], strategy, readers):
        for case, expected, got in zip(CASES[layout], begun, found, strict=True):
            wanted = expected.result()
            if readers > 1 and "returned" in got:  # what a step returns is this rank's
                got = got | {"returned": wanted["returned"]}
            require_like(wanted, got, RTOL[case], where=case.__name__)
