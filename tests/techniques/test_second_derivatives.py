"""Losses of gradients: what one process differentiates twice, ranks that divide tensors do alike."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    ActivationCheckpoint,
    ContextParallel,
    ContextParallelStrategy,
    DataParallel,
    HybridStrategy,
    ParallelPlan,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
)
from lightning_parallel.collectives.by_elements import complete
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided import rules  # noqa: F401
from lightning_parallel.techniques.divided.functions import FunctionsGetWholes
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import begun_on_one, ranks, run_on_ranks
from tests.techniques.test_divided import DIVISIONS, OPERATIONS, WAYS, replicated, require_gradient, values
from tests.tiers import covering, sampled
from tests.trainers import trainer

OF_TORCH = ("of a reentrant checkpoint",)
"""What torch itself does not differentiate twice."""


def small(x: Tensor) -> Tensor:
    """So that rounding is not all that is left of a sine."""
    return x / (1 + x.detach().abs().max())


def penalised(operation: Any, x: Tensor, w: Tensor, among: Ranks | None = None) -> Tensor:
    """A loss of gradients by both, with a history of its own."""
    made = operation(x, w)
    made = made.whole() if isinstance(made, Divided) else made
    weights = torch.linspace(1, 2, made.numel(), dtype=made.dtype).view(made.shape)
    wanted = [each for each in (x, w) if each.requires_grad]
    found = torch.autograd.grad((small(made).sin() * weights).sum(), wanted, create_graph=True, allow_unused=True)
    found = [each for each in found if each is not None]
    loss = sum((small(each).cos() * (1 + number)).sum() for number, each in enumerate(found)) + made.square().sum()
    loss = loss.whole() if isinstance(loss, Divided) else loss
    if among is not None:
        among.reduces_later = True
    loss.backward()
    return loss.detach()


def compared(operation: Any, division: dict[int, Any], way: str) -> None:
    x, w = values()
    x.requires_grad_(), w.requires_grad_()
    expected = penalised(operation, x, w)
    among = Ranks(dist.group.WORLD, "tp", averages=(lambda _: True) if way == "averaged" else None)
    (dim, make), *_ = division.items()
    elements = make(among)
    own = elements.take(x.detach(), dim).clone().requires_grad_()
    mine = replicated(w, way)
    with FunctionsGetWholes():
        found = penalised(operation, Divided(own, {dim: elements}), mine, among)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(complete(own.grad, dim, elements), elements.take(x.grad, dim), rtol=1e-9, atol=1e-11)
    if w.grad is None:
        assert mine.grad is None
        return
    require_gradient(mine, w, way, rtol=1e-9, atol=1e-11)


@pytest.mark.exhaustive
@sampled(1, "division", DIVISIONS)
@ranks(2)
def test_of_operations(division):
    failed = []
    for name, operation in OPERATIONS.items():
        for way in WAYS if name not in OF_TORCH else ():
            try:
                with sdpa_kernel(SDPBackend.MATH):
                    compared(operation, DIVISIONS[division], way)
            except Exception as error:
                failed.append(f"{name} ({way}): {type(error).__name__} {str(error)[:300]}")
    assert not failed, "\n".join(failed)


# ---------------------------------------------------------------- training

WIDTH, WORDS = 16, 11


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.softplus(self.up(self.norm(x))))


class Attends(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.before = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (each(h).unflatten(-1, (4, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        with sdpa_kernel(SDPBackend.MATH):
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return super().forward(x + self.o(h.transpose(1, 2).flatten(2)))


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


class Forces(Twice):
    """Energies, and forces as their gradients."""

    def loss(self, x: Tensor, wanted: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = self.net(x).sum((1, 2))
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return F.mse_loss(energy, wanted.sum((1, 2))) + (forces + wanted).square().mean()


class Equation(Twice):
    """A network of two numbers that solves an equation with a second derivative."""

    def loss(self, x: Tensor, wanted: Tensor) -> Tensor:
        place, time = x[..., :1].clone().requires_grad_(), x[..., 1:2].clone().requires_grad_()
        u = self.net(torch.cat([place, time, x[..., 2:]], -1))
        ones = torch.ones_like(u)
        slope, change = torch.autograd.grad(u, (place, time), ones, create_graph=True)
        (curve,) = torch.autograd.grad(slope, place, ones, create_graph=True)
        return (change - 0.1 * curve + u * slope).square().mean() + F.mse_loss(u, wanted[..., :1])


class OfWords(Twice):
    """A penalty on what embeddings of words do to a loss over classes."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.words = Network(WIDTH, WORDS), nn.Embedding(WORDS, WIDTH)

    def loss(self, x: Tensor, wanted: Tensor) -> Tensor:
        ids, labels = ((each * 10).long().flatten(1).remainder(WORDS) for each in (x, wanted))
        embedded = self.words(ids)
        each = F.cross_entropy(self.net(embedded).transpose(1, 2), labels, reduction="none").sum(1)
        (gradient,) = torch.autograd.grad(each.sum(), embedded, create_graph=True)
        return each.mean() + gradient.square().sum((1, 2)).sqrt().mean()


class OfWeights(Twice):
    """A penalty on gradients of all weights, and a product with a Hessian."""

    def loss(self, x: Tensor, wanted: Tensor) -> Tensor:
        loss, weights = F.mse_loss(self.net(x), wanted[..., :1]), [*self.net.parameters()]
        found = torch.autograd.grad(loss, weights, create_graph=True)
        along = sum((each * weight.detach()).sum() for each, weight in zip(found, weights, strict=True))
        products = torch.autograd.grad(along, weights, create_graph=True)
        return loss + sum(each.square().sum() for each in found) + 0.01 * sum(each.square().sum() for each in products)


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


MODELS = (Forces, Equation, OfWords, OfWeights, Critic, Adapts)
PLAN = ParallelPlan(
    blocks="net.layers.*",
    styles={
        **{f"*.layers.*.{name}": "colwise" for name in ("up", "q", "k", "v")},
        **{f"*.layers.*.{name}": "rowwise" for name in ("down", "o")},
    },
)
LAYOUTS: dict[str, Any] = {
    "tp": (2, 1, partial(TensorParallelStrategy, 2)),
    "tp, whole sequence": (2, 1, partial(TensorParallelStrategy, 2, sequence_parallel=False)),
    "four": (4, 1, partial(TensorParallelStrategy, 4)),
    "dp": (4, 2, partial(HybridStrategy, DataParallel(2), TensorParallel(2))),
    "zero 1": (4, 2, partial(HybridStrategy, Zero(2, stage=1), TensorParallel(2))),
    "zero 2": (4, 2, partial(HybridStrategy, Zero(2, stage=2), TensorParallel(2))),
    "zero 3": (4, 2, partial(HybridStrategy, Zero(2, stage=3), TensorParallel(2))),
    "cp": (2, 1, partial(ContextParallelStrategy, 2, method="ulysses")),
    "cp and tp": (4, 1, partial(HybridStrategy, ContextParallel(2, method="ulysses"), TensorParallel(2))),
    "zero 3 over cp": (2, 1, partial(HybridStrategy, ContextParallel(2, method="ulysses"), Zero(1, stage=3))),
    "recomputed": (2, 1, partial(HybridStrategy, TensorParallel(2), ActivationCheckpoint())),
}


def trained(model: Any, make_strategy: Any, data_ranks: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    x, wanted = torch.randn(24, 5, 3, dtype=torch.float64), torch.randn(24, 5, 3, dtype=torch.float64)
    data = DataLoader(TensorDataset(x, wanted), 8 // data_ranks)
    module = model().double()
    run = trainer(make_strategy() if make_strategy else "auto", max_epochs=2, precision="64-true", limit_val_batches=0)
    run.fit(module, data)
    return {name: float(value) for name, value in run.callback_metrics.items()}, dict(module.state_dict())


@covering(keep=1, layout=[*LAYOUTS], model=MODELS)
def test_training(layout: str, model: Any) -> None:
    n, data_ranks, make_strategy = LAYOUTS[layout]
    if model in (OfWeights, Adapts) and data_ranks > 1:
        pytest.skip("the gradient of a mean over all samples is no mean")
    expected = begun_on_one(trained, model, None, 1)
    for metrics, found in run_on_ranks(n, trained, model, partial(make_strategy, plan=PLAN), data_ranks):
        wanted, weights = expected.result()
        assert metrics == pytest.approx(wanted, rel=1e-9)
        torch.testing.assert_close(found, weights, rtol=1e-9, atol=1e-10)


class KeepsGraph(Critic):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.net(batch[0]).mean(), create_graph=True)


def said() -> str:
    with pytest.raises(RuntimeError) as raised:
        trained(KeepsGraph, partial(TensorParallelStrategy, 2, plan=PLAN), 1)
    return str(raised.value)


def test_gradients_of_parameters_with_a_graph_are_refused_with_a_remedy() -> None:
    for each in run_on_ranks(2, said):
        assert "use torch.autograd.grad(loss, parameters, create_graph=True)" in each
