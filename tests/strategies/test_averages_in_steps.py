"""Averages of weights, and weights, that a step changes itself are those of one device, or refused in a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import (
    DataParallelStrategy,
    HybridStrategy,
    PipelineParallelStrategy,
    TensorParallel,
    Zero,
    ZeroStrategy,
)
from tests.models import points
from tests.ranks import RanksFailed, begun_on_one, run_on_ranks
from tests.tiers import covering
from tests.trainers import trainer


class Slotted:
    """Holds tensors where no `vars()` finds them."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors


class Student(LightningModule):
    """Learns to agree with an average of its weights; `held` tells where that is."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.held = held
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
        if held in ("module", "data", "weights"):
            self.teacher = self.halved()

    def halved(self) -> nn.Module:
        teacher = copy.deepcopy(self.net).requires_grad_(False)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(0.5)
        return teacher

    def on_train_start(self) -> None:
        if self.held in ("module", "data", "weights"):
            return
        teacher = self.halved()
        weights: list[Tensor] = list(teacher.parameters())
        self.kept: Any = {"list": [teacher], "slots": Slotted(weights), "closure": lambda: weights}[self.held]

    def averages(self) -> Iterable[Tensor]:
        if self.held in ("module", "data", "weights"):
            return self.teacher.parameters()
        if self.held == "list":
            return self.kept[0].parameters()  # type: ignore[no-any-return]
        return self.kept.tensors if self.held == "slots" else self.kept()  # type: ignore[no-any-return]

    def training_step(self, batch: Any) -> Tensor:
        if self.held == "weights":
            with torch.no_grad():
                self.net[0][0].weight.mul_(0.9)
        out = self.net(batch[0][:, :8])
        with torch.no_grad():
            for average, parameter in zip(self.averages(), self.net.parameters(), strict=True):
                if self.held == "data":
                    average.data = average.data * 0.7 + parameter.data * 0.3
                else:
                    average.mul_(0.7).add_(parameter.detach(), alpha=0.3)
        pairs = zip(self.averages(), self.net.parameters(), strict=True)
        return out.square().mean() + sum((p - average).square().mean() for average, p in pairs)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def trained(held: str, make_strategy: Any, data_ranks: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Student(held)
    run = trainer(make_strategy() if make_strategy else "auto", max_epochs=1, precision="64-true")
    run.fit(module, DataLoader(points(16, seed=1), 8 // data_ranks))
    return dict(module.state_dict())


LAYOUTS: dict[str, Any] = {
    "dp": (2, 2, partial(DataParallelStrategy, 2)),
    "zero 1": (2, 2, partial(ZeroStrategy, 2, stage=1)),
    "zero 3": (2, 2, partial(ZeroStrategy, 2, stage=3)),
    "zero 3 and tp": (4, 2, partial(HybridStrategy, Zero(2, stage=3), TensorParallel(2))),
}


@covering(layout=[*LAYOUTS], held=["module", "data", "weights", "list", "slots", "closure"])
def test_training(layout: str, held: str) -> None:
    n, data_ranks, make_strategy = LAYOUTS[layout]
    expected = begun_on_one(trained, held, None, 1)
    for weights in run_on_ranks(n, trained, held, make_strategy, data_ranks):
        torch.testing.assert_close(weights, expected.result(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("held", ["module", "closure"])
def test_pipeline(held: str) -> None:
    with pytest.raises(RanksFailed, match=r"the step changes .* in place, as an average of weights"):
        run_on_ranks(2, trained, held, partial(PipelineParallelStrategy, 2, microbatches=2), 1)
