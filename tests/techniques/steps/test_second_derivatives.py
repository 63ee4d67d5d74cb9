"""Losses of gradients: what one process differentiates twice, ranks that divide tensors do alike."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    ActivationCheckpoint,
    ContextParallel,
    DataParallel,
    ParallelPlan,
    TensorParallel,
    Zero,
)
from tests.layouts import hybrid
from tests.ranks import ranks
from tests.strategies.one_and_two import assert_like_one_device
from tests.tiers import sampled
from tests.trainers import trainer

WIDTH = 16


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (each(h).unflatten(-1, (4, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        with sdpa_kernel(SDPBackend.MATH):
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        return x + self.down(F.softplus(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.first = nn.Linear(into, WIDTH)
        self.layers = nn.ModuleList(Attends() for _ in range(2))
        self.last = nn.Linear(WIDTH, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Twice(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Network(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class Equation(Twice):
    """A network of two numbers that solves an equation with a second derivative."""

    def loss(self, x: Tensor, wanted: Tensor) -> Tensor:
        place, time = x[..., :1].clone().requires_grad_(), x[..., 1:2].clone().requires_grad_()
        u = self.net(torch.cat([place, time, x[..., 2:]], -1))
        ones = torch.ones_like(u)
        slope, change = torch.autograd.grad(u, (place, time), ones, create_graph=True)
        (curve,) = torch.autograd.grad(slope, place, ones, create_graph=True)
        return (change - 0.1 * curve + u * slope).square().mean() + F.mse_loss(u, wanted[..., :1])


class Critic(Twice):
    """The critic of a WGAN with a gradient penalty, and its generator, by hand."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.net, self.maker = Network(3, 1), Network(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch
        maker, critic = self.optimizers()
        made = self.maker(noise)
        mixed = (0.3 * real + 0.7 * made.detach()).requires_grad_()
        (gradient,) = torch.autograd.grad(self.net(mixed).sum(), mixed, create_graph=True)
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        loss = self.net(made.detach()).mean() - self.net(real).mean() + 10 * penalty
        for optimizer, each in ((critic, loss), (maker, None)):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(-self.net(self.maker(noise)).mean() if each is None else each)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("train_loss", loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(each.parameters(), lr=0.01, eps=1e-3) for each in (self.maker, self.net)]


class Adapts(Twice):
    """Learns weights from which a step of gradients leads far (MAML)."""

    def loss(self, x: Tensor, wanted: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(functional_call(self.net, weights, (x[:, :3],)), wanted[:, :3, :1])
            found = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
            weights = {name: each - 0.03 * by for (name, each), by in zip(weights.items(), found, strict=True)}
        return F.mse_loss(functional_call(self.net, weights, (x,)), wanted[..., 1:2])


class KeepsGraph(Critic):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.net(batch[0]).mean(), create_graph=True)


STYLES = {"colwise": ("up", "q", "k", "v"), "rowwise": ("down", "o")}
PLAN = ParallelPlan(
    blocks="net.layers.*", styles={f"*.layers.*.{name}": style for style, names in STYLES.items() for name in names}
)
PART, OVER = TensorParallel(2), ContextParallel(2, method="ulysses")
ROWS: list[tuple[type[Twice], int, int, Any]] = [
    (Critic, 4, 2, hybrid(Zero(2), PART)),
    (Equation, 4, 1, hybrid(OVER, PART)),
    (Equation, 2, 1, hybrid(TensorParallel(2, sequence_parallel=False))),
    (Adapts, 2, 1, hybrid(PART)),
    (Equation, 2, 1, hybrid(PART, ActivationCheckpoint())),
    (Critic, 4, 2, hybrid(Zero(2, stage=1), PART)),
    (Equation, 4, 2, hybrid(DataParallel(2), PART)),
    (Adapts, 4, 1, hybrid(TensorParallel(4))),
    (Critic, 2, 1, hybrid(OVER, Zero(1))),
]


def trained(model: Any, make_strategy: Any, data_ranks: int) -> Any:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    x, wanted = torch.randn(24, 5, 3, dtype=torch.float64), torch.randn(24, 5, 3, dtype=torch.float64)
    data = DataLoader(TensorDataset(x, wanted), 8 // data_ranks)
    module = model().double()
    strategy = make_strategy(plan=PLAN) if make_strategy else "auto"
    run = trainer(strategy, max_epochs=2, precision="64-true", limit_val_batches=0)
    run.fit(module, data)
    return {name: float(value) for name, value in run.callback_metrics.items()}, dict(module.state_dict())


@sampled(1, ("model", "ranks_", "readers", "strategy"), ROWS, ids=lambda value: getattr(value, "__name__", ""))
def test_losses_of_gradients_train_as_on_one_device(
    model: type[Twice], ranks_: int, readers: int, strategy: Any
) -> None:
    assert_like_one_device(trained, ranks_, (model, None, 1), (model, strategy, readers), rtol=1e-9, atol=1e-10)


@ranks(2)
def test_gradients_with_a_graph_are_refused_with_a_remedy() -> None:
    said = r"use torch.autograd.grad\(loss, parameters, create_graph=True\)"
    with pytest.raises(RuntimeError, match=said):
        trained(KeepsGraph, hybrid(PART), 1)
