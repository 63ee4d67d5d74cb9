"""Steps of automatic optimization find, change and drop the gradients of batches before as on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from lightning_parallel import DataParallelStrategy, HybridStrategy, TensorParallel, Zero, ZeroStrategy
from tests.ranks import begun_on_one, run_on_ranks
from tests.tiers import covering
from tests.trainers import trainer


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norms = nn.Linear(6, 6), list[float]()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(2))

    def loss(self, batch: Tensor) -> Tensor:
        batch = self.stem(batch)
        for layer in self.layers:
            batch = batch + layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Dropping(Plain):
    """Leaves out the first of some batches that accumulate."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx in (1, 5):
            self.zero_grad()
        return self.loss(batch)


class Scaling(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for parameter in self.layers.parameters():
            if parameter.grad is not None and batch_idx % 2:
                parameter.grad.mul_(0.5)
        return self.loss(batch)


class Weighing(Plain):
    """Weighs a loss by the gradient of the batch before."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        before = self.stem.weight.grad
        self.norms.append(0.0 if before is None else float(before.norm()))
        return self.loss(batch) * (1 + self.norms[-1])


Trained = tuple[dict[str, Tensor], list[float]]


def trained(kind: type[Plain], batch: int, make_strategy: Callable[[], Any] | None = None) -> Trained:
    torch.manual_seed(0)
    module, data = kind(), torch.randn(32, 6, dtype=torch.float64)
    run: Any = {"max_epochs": 1, "precision": "64-true", "accumulate_grad_batches": 2}
    trainer("auto" if make_strategy is None else make_strategy(), **run).fit(module, DataLoader(data, batch))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, module.norms


LAYOUTS: dict[str, tuple[Callable[[], Any], int]] = {
    "zero 3": (ZeroStrategy, 2),
    "zero 1": (partial(ZeroStrategy, stage=1), 2),
    "zero 2": (partial(ZeroStrategy, stage=2), 2),
    "data parallel": (DataParallelStrategy, 2),
    "tensor x zero 3": (partial(HybridStrategy, TensorParallel(2), Zero(2)), 4),
}


@covering(keep=1, layout=LAYOUTS, kind=[Dropping, Scaling, Weighing])
def test_they_do_what_one_device_does(layout: str, kind: type[Plain]) -> None:
    strategy, ranks = LAYOUTS[layout]
    expected = begun_on_one(trained, kind, 4)
    for got in run_on_ranks(ranks, trained, kind, 2, strategy):
        torch.testing.assert_close(got, expected.result(), rtol=1e-9, atol=1e-11)
