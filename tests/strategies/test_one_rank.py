"""One rank alone, as on the machine where a run is prepared: it trains and refuses as several ranks do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from lightning_parallel import HybridStrategy, Zero
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import made, require_like
from tests.strategies.test_unusual_models import Scripted
from tests.tiers import sampled
from tests.trainers import trainer

WIDTH = 6
LAYOUTS = {
    "zero 1": lambda: HybridStrategy(Zero(1, stage=1)),
    "zero 2": lambda: HybridStrategy(Zero(1, stage=2)),
    "zero 3": lambda: HybridStrategy(Zero(1)),
    "zero 3 offloaded": lambda: HybridStrategy(Zero(1, offload=True)),
}


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.seen = nn.Linear(WIDTH, WIDTH), list[float]()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ZeroesFirst(Plain):
    """Two passes through one graph, for whose sum it sets gradients to zero before; clips them."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        found = self(batch)
        self.manual_backward(found.square().mean(), retain_graph=True)
        self.manual_backward(found.abs().mean() / 2)
        self.seen.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.3)))
        optimizer.step()


class Adversaries(Plain):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        for optimizer, sign in zip(optimizers, (-1, 1), strict=True):
            self.toggle_optimizer(optimizer)
            loss = F.softplus(sign * self.judge(self(batch))).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.seen.append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        made = [*self.stem.parameters(), *self.layers.parameters()]
        return [optim.Adam(made, lr=0.01), optim.Adam(self.judge.parameters(), lr=0.01)]


class LooksBack(Plain):
    """Weighs a loss by the gradient of the batch before, and drops or halves some."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        before = self.stem.weight.grad
        self.seen.append(0.0 if before is None else float(before.norm()))
        if batch_idx in (1, 6):
            self.zero_grad()
        for parameter in self.layers.parameters():
            if parameter.grad is not None and batch_idx % 2:
                parameter.grad.mul_(0.5)
        return self(batch).square().mean() * (1 + self.seen[-1])


KINDS: list[type[Plain]] = [ZeroesFirst, Adversaries, LooksBack]


def trained(make_strategy: Callable[[], Strategy] | None) -> Any:
    found = []
    for kind in KINDS:
        torch.manual_seed(0)
        module, data = kind(), torch.randn(32, WIDTH, dtype=torch.float64)
        accumulated = 2 if kind.automatic_optimization is not False else 1
        run = trainer(made(make_strategy), max_epochs=1, precision="64-true", accumulate_grad_batches=accumulated)
        run.fit(module, DataLoader(data, 4))
        found.append((module.seen, {name: value.clone() for name, value in module.state_dict().items()}))
    return found


@sampled(3, "layout", LAYOUTS)
def test_gradients_that_steps_look_at_are_those_of_one_device(layout: str) -> None:
    expected = begun_on_one(trained, None)
    (found,) = run_on_ranks(1, trained, LAYOUTS[layout])
    require_like(expected.result(), found)


class Scaled(nn.Parameter):
    pass


class OwnKind(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.stem.weight = Scaled(self.stem.weight.detach())


class Halves(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.stem.weight.register_hook(lambda gradient: gradient / 2)


class Averages(Plain):
    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer


ROWS = DataLoader(torch.randn(4, WIDTH), 2)
REFUSED: list[tuple[Callable[[], LightningModule], DataLoader[Any], str]] = [
    (OwnKind, ROWS, r"stem.weight is of the class Scaled, and Zero.*\(parameter.scaled = True\)"),
    (Halves, ROWS, "the hook of torch on stem.weight would see a part of its gradient"),
    (Averages, ROWS, "the step hook of SGD would see the shards that each rank steps"),
    (Scripted, DataLoader(torch.zeros(4, 5, dtype=torch.int64), 2), "net.5 is a module of TorchScript"),
]


def refused() -> None:
    for make, data, said in REFUSED:
        with pytest.raises(ValueError, match=said):
            trainer(LAYOUTS["zero 3"](), max_epochs=1).fit(make(), data)


def test_what_would_see_a_part_is_refused_as_on_several() -> None:
    run_on_ranks(1, refused)
