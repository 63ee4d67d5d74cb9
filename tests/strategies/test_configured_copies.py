"""Copies of parameters that `configure_optimizers` makes are those of one device, and so is what it writes."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import HybridStrategy, TensorParallel, TensorParallelStrategy, Zero, ZeroStrategy
from tests.models import points
from tests.ranks import begun_on_one, run_on_ranks
from tests.techniques.test_divided_parameters import PLAN, Layer
from tests.tiers import covering
from tests.trainers import trainer


class Anchored(LightningModule):
    """Is drawn to what its weights were, and to an average of them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers, self.way = nn.ModuleList(Layer() for _ in range(2)), way

    def configure_optimizers(self) -> Any:
        with torch.no_grad():
            self.layers[0].up.weight.mul_(0.5)
            self.layers[1].down.weight.data[:, 1] = 0.25
        parameters = list(self.parameters())
        if self.way == "copies":
            self.kept = [p.detach().clone() for p in parameters]
            self.average = [torch.zeros_like(p) + p.data.clone() for p in parameters]
        else:
            self.kept = [value.clone() for value in self.state_dict().values()]
            self.average = [p.requires_grad_(False) for p in copy.deepcopy(self.layers).parameters()]
        assert not self.layers[0].up.weight.grad_fn
        return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0][:, :8]
        for layer in self.layers:
            x = layer(x)
        parameters = list(self.parameters())
        with torch.no_grad():
            for average, parameter in zip(self.average, parameters, strict=True):
                average.lerp_(parameter, 0.3)
        away = sum((p - k).square().sum() for p, k in zip(parameters, self.kept, strict=True))
        near = sum((p - a).square().mean() for p, a in zip(parameters, self.average, strict=True))
        loss = x.square().mean() + 0.1 * away + near
        self.log("train_loss", loss)
        return loss


def trained(way: str, make_strategy: Any, data_ranks: int) -> tuple[float, dict[str, Tensor]]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    module = Anchored(way)
    strategy = make_strategy() if make_strategy else "auto"
    run = trainer(strategy, max_epochs=1, limit_val_batches=0, precision="64-true")
    run.fit(module, DataLoader(points(16, seed=1), 4 // data_ranks))
    return float(run.callback_metrics["train_loss"]), dict(module.state_dict())


LAYOUTS: dict[str, Any] = {
    "tp": (2, 1, partial(TensorParallelStrategy, 2, plan=PLAN)),
    "zero 3": (2, 2, partial(ZeroStrategy, 2, stage=3, plan=PLAN)),
    "zero 1": (2, 2, partial(ZeroStrategy, 2, stage=1, plan=PLAN)),
    "tp and zero 3": (4, 2, partial(HybridStrategy, Zero(2, stage=3), TensorParallel(2), plan=PLAN)),
    "offloaded": (2, 2, partial(ZeroStrategy, 2, stage=3, offload=True, plan=PLAN)),
}


@covering(keep=1, layout=[*LAYOUTS], way=["copies", "modules"])
def test_training(layout: str, way: str) -> None:
    n, data_ranks, make_strategy = LAYOUTS[layout]
    expected = begun_on_one(trained, way, None, 1)
    for loss, weights in run_on_ranks(n, trained, way, make_strategy, data_ranks):
        wanted, theirs = expected.result()
        assert loss == pytest.approx(wanted, rel=1e-9)
        torch.testing.assert_close(weights, theirs, rtol=1e-9, atol=1e-10)
