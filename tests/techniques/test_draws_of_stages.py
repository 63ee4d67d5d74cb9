"""Steps that draw noise or masks outside of their blocks, and use them before the blocks and after them."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import HybridStrategy, LayerParallelStrategy, PipelineParallel, TensorParallel
from tests.curves import compare_weights
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import made
from tests.tiers import covering, sampled
from tests.trainers import trainer

WIDTH = 8


class Block(nn.Module):
    def __init__(self, drop: float, changes: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop, self.changes = drop, changes

    def forward(self, x: Tensor) -> Tensor:
        if self.drop:
            random.random()
        changed = F.dropout(self.down(F.gelu(self.up(x))), self.drop, self.training)
        return x + (changed if self.changes else 0 * changed)


class Noisy(LightningModule):
    """The loss is how far what the blocks were given is from what the loss is given: 0, as blocks change nothing."""

    changes = False

    def __init__(self, source: str, drop: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(drop, self.changes) for _ in range(4))
        self.head, self.source, self.losses = nn.Linear(WIDTH, WIDTH), source, []
        self.own = torch.Generator().manual_seed(5)

    def noise(self, like: Tensor) -> Tensor:
        if self.source == "module":
            return torch.randn(like.shape, generator=self.own).to(like)
        if self.source == "python":
            return torch.full_like(like, random.random())
        return (
            torch.as_tensor(np.random.randn(*like.shape)).to(like) if self.source == "numpy" else torch.randn_like(like)
        )

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        noise = self.noise(batch)
        far = F.mse_loss(self.through(noise), noise)
        self.log("far", far)
        return far + 0 * self.head(noise).sum()

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["far"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Denoising(Noisy):
    changes = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        noise = self.noise(batch)
        loss = F.mse_loss(self.head(self.through(batch + noise)), noise)
        self.log("far", loss)
        return loss


def trained(strategy: Any, kind: type[Noisy], source: str, drop: float) -> tuple[list[float], dict[str, Tensor]]:
    np.random.seed(3)
    module = kind(source, drop)
    data = torch.randn(16, 3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    run = trainer(made(strategy), max_epochs=2, limit_val_batches=0, precision="64-true")
    run.fit(module, DataLoader(data, 4, shuffle=True))
    return module.losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


PIPELINES: dict[str, dict[str, Any]] = {
    "even": {"microbatches": 2},
    "uneven": {"microbatches": 2, "split": [3, 1]},
    "interleaved": {"microbatches": 2, "schedule": "interleaved_1f1b"},
    "zbv": {"microbatches": 4, "schedule": "zbv"},
}


def pipeline(layout: str) -> HybridStrategy:
    return HybridStrategy(PipelineParallel(2, **PIPELINES[layout]))


@covering(keep=1, layout=PIPELINES, source=["torch", "module", "python", "numpy"], drop=[0.0, 0.1])
def test_stages_draw_the_same_outside_of_blocks(layout: str, source: str, drop: float) -> None:
    for losses, _ in run_on_ranks(2, trained, partial(pipeline, layout), Noisy, source, drop):
        assert losses == [0.0] * 8


@sampled(1, "source", ["torch", "module", "numpy"])
def test_a_whole_batch_draws_what_one_device_draws(source: str) -> None:
    expected = begun_on_one(trained, None, Denoising, source, 0.0)
    for losses, weights in run_on_ranks(2, trained, LayerParallelStrategy, Denoising, source, 0.0):
        assert losses == pytest.approx(expected.result()[0], rel=1e-9)
        compare_weights(expected.result()[1], weights, 1e-9)


def test_dropout_differs_between_blocks_microbatches_and_batches() -> None:
    first, second = (
        run_on_ranks(2, trained, partial(pipeline, name), Denoising, "torch", 0.5) for name in ("even", "uneven")
    )
    assert first[0][0] == pytest.approx(second[0][0], rel=1e-9)  # however blocks are divided
    assert len({round(loss, 6) for loss in first[0][0]}) == 8


def both() -> HybridStrategy:
    return HybridStrategy(PipelineParallel(2, microbatches=2, split=[3, 1]), TensorParallel(2))


def test_stages_of_tensor_parallel_draw_the_same() -> None:
    for losses, _ in run_on_ranks(4, trained, both, Noisy, "torch", 0.1):
        assert max(losses) < 1e-20
