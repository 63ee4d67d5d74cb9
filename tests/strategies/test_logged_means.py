"""Values that a step makes of means over targets and logs, where parts of a batch have unlike numbers of targets."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import lightning_parallel as lp
from lightning_parallel import (
    DataParallelStrategy,
    PipelineParallelStrategy,
)
from tests.layouts import Layout, layouts
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, made
from tests.techniques.test_means import Logged
from tests.tiers import sampled
from tests.trainers import trainer

WIDTH, LENGTH, CLASSES, IGNORED = 6, 5, 4, -100


class Words(LightningModule):
    """Learns the targets of one head; two heads have targets of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))
        self.average = MeanMetric()
        self.returned: list[Tensor] = []

    def losses(self, batch: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, first, second = batch
        for layer in self.layers:
            x = x + layer(x)
        logits = [head(x).transpose(1, 2) for head in self.heads]
        hits, known = ((logits[0].argmax(1) == first) & (first != IGNORED)).sum(), (first != IGNORED).sum()
        return F.cross_entropy(logits[0], first), F.cross_entropy(logits[1], second), lp.mean(hits, known)

    def step(self, stage: str, batch: list[Tensor]) -> Tensor:
        loss, other, hits = self.losses(batch)
        values = {
            "loss": loss,
            "other": other,
            "hits": hits,
            "detached": loss.detach(),
            "error": (batch[0] - 0.1).square().mean(),
        }
        values["masked"] = self.masked(batch)
        if loss.requires_grad:  # which tells what a sum was made of
            values |= {"twice": loss * 2, "negative": -loss, "bits": loss / math.log(2), "shared": loss + 3 * loss}
            values |= {"both": loss + 0.5 * other, "beside": loss + 0.1 * batch[0].square().mean()}
        if self.global_step % 2:
            del values["detached"]
        self.log_dict({f"{stage}_{name}": value for name, value in values.items()}, on_step=True, on_epoch=True)
        return loss

    def masked(self, batch: list[Tensor]) -> Tensor:
        """A masked mean by hand."""
        known, size = batch[1] != IGNORED, self.heads[0](batch[0]).square().mean(-1)
        return lp.mean((size * known).sum(), known.sum())

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


def targets(random: torch.Generator) -> Tensor:
    """Ever fewer of them in a sample, unlike in each batch."""
    drawn = torch.randint(CLASSES, (24, LENGTH), generator=random)
    return drawn.masked_fill(torch.rand(24, LENGTH, generator=random) < torch.linspace(0, 0.9, 24)[:, None], IGNORED)


class Run(NamedTuple):
    values: list[dict[str, float]]
    returned: list[float]
    average: float


def logged(strategy: MakeStrategy | None, readers: int) -> Run:
    random, seen, model = torch.Generator().manual_seed(1), Logged(), Words()
    data = TensorDataset(torch.randn(24, LENGTH, WIDTH, generator=random).double(), targets(random), targets(random))
    loader = partial(DataLoader, data, 8 // readers)
    trainer(made(strategy), precision="64-true", max_epochs=2, callbacks=[seen]).fit(model, loader(), loader())
    return Run(seen.values, list(map(float, model.returned)), float(model.average.compute()))


LAYOUTS = layouts(
    *("pipeline of 4 microbatches", "pipeline over the batch", "data parallel", "zero 3", "pipeline x data parallel")
)
LAYOUTS["pipeline of 3 microbatches"] = Layout(2, 1, partial(PipelineParallelStrategy, 2, microbatches=3))


@sampled(1, "layout", LAYOUTS)
def test_values_made_of_means_are_those_of_one_device(layout: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    begun = begun_on_one(logged, None, 1)
    for found in run_on_ranks(ranks, logged, strategy, readers):
        expected = begun.result()
        for number, (wanted, got) in enumerate(zip(expected.values, found.values, strict=True)):
            assert got == pytest.approx(wanted, rel=1e-9), f"step {number}"
        assert found.average == pytest.approx(expected.average, rel=1e-5)
        if readers == 1:  # what a step returns is this rank's
            assert found.returned == pytest.approx(expected.returned, rel=1e-9)


def test_samples_that_do_not_divide_among_ranks_count_exactly() -> None:
    begun = begun_on_one(uneven, None, 1)
    for found in run_on_ranks(3, uneven, DataParallelStrategy, 3):
        assert found == pytest.approx(begun.result(), rel=1e-13)


def uneven(strategy: MakeStrategy | None, readers: int) -> dict[str, float]:
    random = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(22, LENGTH, WIDTH, generator=random).double(), *2 * [targets(random)[:22]])
    (logged,) = trainer(made(strategy), precision="64-true").validate(
        Words(), DataLoader(data, 12 // readers), verbose=False
    )
    return {name: logged[f"{name}_epoch"] for name in ("val_error", "val_loss", "val_hits")}
