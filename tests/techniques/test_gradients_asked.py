"""Steps that ask for gradients themselves: perturbations, gradients of weights, backward passes."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import (
    Compile,
    ContextParallel,
    ContextParallelStrategy,
    HybridStrategy,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
)
from tests.rank_process import leave_group
from tests.ranks import begun_on_one, run_on_ranks
from tests.techniques.test_context_models import WIDTH, WORDS, Model, tokens, trained
from tests.tiers import sampled
from tests.trainers import trainer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Plain(Model):
    depth = 2

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Block() for _ in range(self.depth))

    def after(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return self.head(h)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.after(self.words(batch[0])).mean(1), batch[1])

    @staticmethod
    def batches() -> list[Any]:
        return [(tokens(length), torch.arange(4) % 3) for length in (9, 12)]


class Asks(Plain):
    """Logs what gradients it gets, and trains on them."""

    def loss(self, batch: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return super().loss(batch)
        h = self.words(batch[0])
        attacked = h + self.attack(h.detach(), batch[1]).sign() / 10
        return super().loss(batch) * self.sharpness(batch) + self.after(attacked * self.saliency(h.detach())).var()

    def attack(self, h: Tensor, labels: Tensor) -> Tensor:
        """A perturbation of each place, and one of all: parameters that the step makes."""
        each = nn.Parameter(torch.zeros(h.shape, dtype=h.dtype))
        common = nn.Parameter(torch.zeros(WIDTH, dtype=h.dtype))
        F.cross_entropy(self.after(h + each + common).mean(1), labels).backward(inputs=[each, common])
        self.log("attack", each.grad.norm() + common.grad.norm())
        return each.grad + common.grad

    def sharpness(self, batch: Any) -> Tensor:
        """Of weights that ranks have whole, in part, and alike."""
        layer = self.layers[1]
        wanted = [self.words.weight, self.head.bias, layer.norm.weight, layer.up.weight, layer.down.bias]
        found = torch.autograd.grad(super().loss(batch), wanted)
        for number, gradient in enumerate(found):
            self.log(f"gradient {number}", gradient.norm())
        return 1 + sum(gradient.detach().square().sum() for gradient in found)

    def saliency(self, h: Tensor) -> Tensor:
        """Of inputs and a weight, from outputs that are no scalars."""
        h.requires_grad_()
        out = self.after(h)
        (to_input,) = torch.autograd.grad(out, h, torch.ones_like(out), retain_graph=True)
        (to_weight,) = torch.autograd.grad([out], [self.head.weight], grad_outputs=[out.detach()])
        self.log("saliency", to_weight.norm())
        return to_input


class GoesBack(Plain):
    """Optimizes by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, loss = self.optimizers(), self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("train_loss", loss)


LAYOUTS = {
    "cp": (2, partial(ContextParallelStrategy, 2)),
    "tp": (2, partial(TensorParallelStrategy, 2)),
    "zero 3 over cp": (2, partial(HybridStrategy, ContextParallel(2), Zero(1, stage=3))),
    "tp and cp": (4, partial(HybridStrategy, ContextParallel(2), TensorParallel(2))),
}


def require_exact(model: type[Model], layout: str) -> None:
    begun = begun_on_one(trained, model, None)
    for metrics, found in run_on_ranks(LAYOUTS[layout][0], trained, model, LAYOUTS[layout][1]):
        expected, weights = begun.result()
        assert metrics == pytest.approx(expected, rel=1e-9)
        torch.testing.assert_close(found, weights, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "layout", ["cp", "tp", *(pytest.param(e, marks=pytest.mark.exhaustive) for e in [*LAYOUTS][2:])]
)
def test_gradients_that_a_step_asks_for_are_complete(layout: str) -> None:
    require_exact(Asks, layout)


@pytest.mark.parametrize(
    "layout", ["tp", *(pytest.param(e, marks=pytest.mark.exhaustive) for e in LAYOUTS if e != "tp")]
)
def test_backward_pass_of_the_users_own_is_exact(layout: str) -> None:
    require_exact(GoesBack, layout)


# ---------------------------------------------------------------- compiled

COMPILED = Compile(backend="aot_eager")
COMPILED_LAYOUTS = {
    "cp": partial(HybridStrategy, ContextParallel(2), COMPILED),
    "tp": partial(HybridStrategy, TensorParallel(2), COMPILED),
}


class Deep(Plain):
    depth = 3


class AsksOfBlocks(Plain):
    def loss(self, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            torch.autograd.grad(super().loss(batch), self.layers[0].norm.weight)
        return super().loss(batch)


def fitted(layout: str) -> str:
    data = DataLoader(AsksOfBlocks.batches(), batch_size=None)
    run = trainer(COMPILED_LAYOUTS[layout](), max_epochs=1, limit_val_batches=0)
    warnings.simplefilter("ignore")  # Lightning's, of a batch_size that it guesses
    with pytest.raises(RuntimeError) as raised:
        run.fit(AsksOfBlocks().double(), data)
    return str(raised.value)


def test_graph_that_would_give_partial_sums_is_refused() -> None:
    for said in run_on_ranks(2, fitted, "cp"):
        assert "parameters in a compiled block" in said
        assert "leave out Compile" in said


def validated(lengths: tuple[int, ...], make_strategy: Any, allowed: int = 1) -> tuple[float, int]:
    if make_strategy is None:
        leave_group()
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    data = DataLoader([(tokens(length), torch.arange(4) % 3) for length in lengths], batch_size=None)
    with torch._dynamo.config.patch(recompile_limit=allowed):
        (found,) = trainer(make_strategy() if make_strategy else "auto").validate(Deep().double(), data)
    return found["val_loss"], torch._dynamo.utils.counters["stats"]["unique_graphs"]


@sampled(1, ("lengths", "layout", "allowed"), [((8,), "tp", 3), ((8, 6), "cp", 1)])
def test_blocks_share_a_graph_up_to_the_recompile_limit(lengths: tuple[int, ...], layout: str, allowed: int) -> None:
    begun = begun_on_one(validated, lengths, None)
    for found, graphs in run_on_ranks(2, validated, lengths, COMPILED_LAYOUTS[layout], allowed):
        assert found == pytest.approx(begun.result()[0], rel=1e-9)
        assert graphs == {"tp": 2, "cp": 1}[layout]  # under tp the first block gets what is not divided
