"""Losses that are means over samples or targets, measured on a few samples; others warn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import ParallelPlan
from tests.heard import heard
from tests.layouts import LAYOUTS
from tests.ranks import run_on_ranks
from tests.tiers import sampled
from tests.trainers import trainer


class Losses(nn.Module):
    """Losses of tokens and their labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.net, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)
        self.norm = nn.BatchNorm1d(8)

    def hidden(self, x: Tensor) -> Tensor:
        return self.net(self.embed(x)).relu()

    def targets(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(x)).mT, y)

    def dropout(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.dropout(self.hidden(x), 0.3)).mT, y)

    def contrast(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = F.normalize(self.hidden(x).mean(1)), F.normalize(self.hidden(x)[:, 0])
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(x)))

    def two_means(self, x: Tensor, y: Tensor) -> Tensor:
        return self.targets(x, y) + self.hidden(x).square().mean()

    def routers(self, x: Tensor, y: Tensor) -> Tensor:
        chances = self.hidden(x).softmax(-1)
        return (chances.mean((0, 1)) * chances.square().mean((0, 1))).sum()

    def total(self, x: Tensor, y: Tensor) -> Tensor:
        return self.hidden(x).square().sum()

    def normed(self, x: Tensor, y: Tensor) -> Tensor:
        return self.norm(self.hidden(x).mean(1)).pow(4).mean()


class Trains(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.losses, self.kind, self.calls = Losses(), kind, 0

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(styles={"losses.net": "colwise"})

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls += 1
        x = batch[:, 0]
        if self.kind == "gathered":
            hidden = self.losses.hidden(x).mean(1)
            every = self.all_gather(hidden, sync_grads=True).flatten(0, 1)
            return (hidden @ every.T).exp().mean().sqrt()
        if self.kind == "pairs":
            z, pairs = self.losses.hidden(x).mean(1), torch.combinations(torch.arange(len(x)))
            return F.pairwise_distance(z[pairs[:, 0]], z[pairs[:, 1]]).square().sum()
        if self.kind == "needs four":
            assert len(x) == 4
        loss: Tensor = getattr(self.losses, "targets" if self.kind == "needs four" else self.kind)(x, batch[:, 1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def said(strategy: Callable[[], Any], kind: str) -> tuple[list[str], int, int]:
    torch.manual_seed(0)
    x = torch.randint(0, 20, (16, 1, 6))
    y = x.masked_fill(torch.arange(96).view(16, 1, 6) % 17 < 5, -100)
    model = Trains(kind)
    with heard() as lines:
        trainer(strategy(), max_epochs=2).fit(model, DataLoader(torch.cat([x, y], 1), 4))
    return [line for line in lines if "together make" in line], model.calls, int(model.losses.norm.num_batches_tracked)


OTHERS = ("contrast", "pairs", "routers", "total", "normed")
ROWS = [
    *(("data parallel", kind) for kind in ("pairs", "targets", "two_means")),
    *(("zero 3", kind) for kind in ("contrast", "normed", "gathered")),
    *(("zero 2", kind) for kind in ("routers", "total", "dropout", "needs four")),
    ("tensor x zero 3", "contrast"),
]


@sampled(2, ("layout", "kind"), ROWS)
def test_loss_that_is_no_mean_over_samples_warns_once(layout: str, kind: str) -> None:
    """The step leaves no trace of it: attributes and buffers are as if it ran on batches alone."""
    ranks, _, strategy = LAYOUTS[layout]
    (lines, calls, norms), *others = run_on_ranks(ranks, said, strategy, kind)
    assert len(lines) == (kind in OTHERS), lines
    assert all("lightning_parallel.mean(total, count)" in line and "whole_batch=" in line for line in lines)
    batches = 2 * 2
    assert (calls, norms) == (batches, batches if kind == "normed" else 0)
    assert all(not lines for lines, *_ in others)
