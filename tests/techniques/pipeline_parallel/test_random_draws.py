"""Steps that draw noise or masks outside of their blocks, and use them before the blocks and after them."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import HybridStrategy, LayerParallelStrategy, PipelineParallel
from tests.layouts import TP2
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.tiers import sampled
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
    """The loss is how far the blocks' noise is from that of the loss: 0, as blocks change nothing."""

    changes = False

    def __init__(self, drop: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(drop, self.changes) for _ in range(4))
        self.head, self.losses = nn.Linear(WIDTH, WIDTH), []
        self.own = torch.Generator().manual_seed(5)

    def noise(self, like: Tensor) -> Tensor:
        """Of every generator that a step may use."""
        of_numpy = torch.as_tensor(np.random.randn(*like.shape)).to(like)
        return torch.randn(like.shape, generator=self.own).to(like) + torch.randn_like(like) + of_numpy

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        noise = self.noise(batch) + random.random()
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
        noise = torch.randn_like(batch)
        loss = F.mse_loss(self.head(self.through(batch + noise)), noise)
        self.log("far", loss)
        return loss


def trained(strategy: Any, kind: type[Noisy], drop: float) -> tuple[list[float], dict[str, Tensor]]:
    np.random.seed(3)
    module = kind(drop)
    data = torch.randn(16, 3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    run = trainer(made(strategy), max_epochs=2, limit_val_batches=0, precision="64-true")
    run.fit(module, DataLoader(data, 4, shuffle=True))
    return module.losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


def pipeline(*others: Any, **options: Any) -> HybridStrategy:
    return HybridStrategy(PipelineParallel(2, **({"microbatches": 2} | options)), *others)


@sampled(
    1,
    ("ranks", "strategy"),
    [
        (2, partial(pipeline, schedule="interleaved_1f1b")),
        (4, partial(pipeline, TP2, split=[3, 1])),
        (2, partial(pipeline, schedule="zbv", microbatches=4)),
    ],
)
def test_stages_draw_the_same_noise_outside_of_blocks(ranks: int, strategy: Any) -> None:
    for losses, _ in run_on_ranks(ranks, trained, strategy, Noisy, 0.1):
        assert max(losses) <= (1e-20 if ranks == 4 else 0.0)
        assert len(losses) == 8


def test_whole_batches_draw_what_one_device_draws() -> None:
    one, many = (None, Denoising, 0.0), (LayerParallelStrategy, Denoising, 0.0)
    assert_like_one_device(trained, 2, one, many, rtol=1e-9, atol=1e-11)


def test_dropout_differs_between_microbatches_and_batches() -> None:
    """However blocks are divided."""
    first, second = (
        run_on_ranks(2, trained, partial(pipeline, split=split), Denoising, 0.5) for split in (None, [3, 1])
    )
    torch.testing.assert_close(torch.tensor(first[0][0]), torch.tensor(second[0][0]), rtol=1e-9, atol=0)
    assert len({round(loss, 6) for loss in first[0][0]}) == 8
