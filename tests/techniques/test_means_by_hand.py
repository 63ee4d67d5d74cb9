"""Means that a step makes by hand with `lightning_parallel.mean`: over all that share a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_parallel as lp
from lightning_parallel import (
    DataParallel,
    HybridStrategy,
    PipelineParallel,
    ZeroStrategy,
)
from lightning_parallel.techniques.tools.means import Means
from tests.layouts import Layout, hybrid, layouts
from tests.ranks import begun_on_one, run_on_ranks
from tests.tiers import covering, sampled
from tests.trainers import trainer

VOCABULARY, LENGTH, WIDTH = 11, 8, 8


def test_mean_by_hand_counts_by_what_it_is_told() -> None:
    losses, mask = torch.rand(6, requires_grad=True), torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(lp.mean((losses * mask).sum(), mask.sum()), losses[mask > 0].mean())
    assert lp.mean(losses.sum() * 0, torch.tensor(0)).isnan()  # outside of a step it is a division
    with Means(elements=False) as means:
        made = [lp.mean((losses * mask).sum(), mask.sum()), lp.mean(losses.sum(), 4)]
        nothing = lp.mean((losses * 0).sum(), torch.tensor(0))
        (losses * mask).sum() / mask.sum()  # is not known to be one
    assert [float(mean.count) for mean in means.all] == [3, 4, 0]
    torch.testing.assert_close(made[0], losses[mask > 0].mean())
    assert nothing == 0  # and not 0 / 0: other parts of the batch may have some
    with pytest.raises(ValueError, match=r"got a total of shape \(6,\): sum it up"):
        lp.mean(losses, 6)


def test_losses_of_which_a_mean_by_hand_is_made_count_by_it_only() -> None:
    x, y = torch.randn(3, 4, 5, requires_grad=True), torch.randint(5, (3, 4))
    with Means() as means:
        beside = F.cross_entropy(x[0], y[0])
        losses = [F.cross_entropy(sample, target) for sample, target in zip(x, y, strict=True)]
        loss = lp.mean(torch.stack(losses).sum(), 3)
    assert [mean.given for mean in means.all] == [beside, loss]


# -------------------------------------------------------------------- whole curves


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class ByHand(LightningModule):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.automatic_optimization = way, way != "manual"
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def loss(self, tokens: Tensor, target: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        weight = self.head.weight
        if self.way == "inside":  # a quotient of the model's own
            weight = weight / (weight.abs().sum() / torch.tensor(weight.numel()))
        logits, counted = F.linear(hidden, weight, self.head.bias), target != 0
        losses = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
        match self.way:
            case "summed":
                summed = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")
                return lp.mean(summed, counted.sum())
            case "beside":  # a loss function's mean, and one over other positions
                mean = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=0)
                return mean + 0.5 * lp.mean((logits.square().sum(-1) * (target > 3)).sum(), (target > 3).sum())
            case _:
                return lp.mean((losses * counted).sum(), counted.sum())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(*batch)
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Losses(Callback):
    def __init__(self) -> None:
        self.all: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.all.append(float(trainer.callback_metrics["loss"]))


def padded(readers: int) -> DataLoader[Any]:
    """Batches of 8 samples, the last of 6; one sample in four has no target."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (22, LENGTH), generator=random)
    without = torch.rand(22, LENGTH, generator=random) < 0.6
    without[::4] = True
    return DataLoader(TensorDataset(tokens, tokens.masked_fill(without, 0)), 8 // readers)


def curve(way: str, strategy: Callable[[], Any], readers: int) -> list[float]:
    seen = Losses()
    data = padded(readers)
    trainer(strategy(), precision="64-true", max_epochs=2, callbacks=[seen]).fit(ByHand(way), data)
    return seen.all


class Evaluated(ByHand):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        tokens, target = batch
        hits, mask = tokens == target, target != 0
        self.log("loss", self.loss(*batch))
        self.log("accuracy", lp.mean(hits.double().sum(), mask.sum()), on_step=True)
        self.log("percent", lp.mean(100 * hits.sum(), mask.sum()))


def evaluated(strategy: Callable[[], Any], readers: int) -> Any:
    return trainer(strategy(), precision="64-true").validate(Evaluated("masked"), padded(readers), verbose=False)[0]


LAYOUTS = layouts(
    *("data parallel", "zero 2", "pipeline of 4 microbatches", "pipeline x data parallel"),
    *("tensor x data parallel", "pipeline x tensor", "context", "context x data parallel"),
)
LAYOUTS["zero 3 of 4"] = Layout(4, 4, ZeroStrategy)  # two samples a batch, of which a rank may have no target at all
LAYOUTS["layers x data parallel"] = Layout(4, 2, hybrid(PipelineParallel(2, microbatches=1), DataParallel(2)))
OF_STAGES = [name for name in LAYOUTS if name.startswith(("pipeline", "layers"))]


@covering(keep=2, layout=LAYOUTS, way=["masked", "summed", "inside"])
def test_means_by_hand_train_as_on_one_device(layout: str, way: str) -> None:
    check(layout, way)


@sampled(2, "layout", [name for name in LAYOUTS if name not in OF_STAGES])
def test_a_mean_by_hand_beside_another_trains_as_on_one_device(layout: str) -> None:
    check(layout, "beside")


def test_means_by_hand_in_manual_optimization() -> None:
    check("zero 2", "manual")


def check(layout: str, way: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    begun = begun_on_one(curve, way, HybridStrategy, 1)
    for losses in run_on_ranks(ranks, curve, way, strategy, readers):
        assert losses == pytest.approx(begun.result(), rel=1e-9)


@sampled(1, "layout", ["zero 3 of 4", "context x data parallel"])
def test_means_by_hand_in_evaluations_are_those_of_one_device(layout: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    begun = begun_on_one(evaluated, HybridStrategy, 1)
    for values in run_on_ranks(ranks, evaluated, strategy, readers):
        assert values == pytest.approx(begun.result(), rel=1e-9)
