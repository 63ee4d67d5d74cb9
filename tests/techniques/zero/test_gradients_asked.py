"""Steps that take gradients themselves: of perturbations, of weights, of inputs."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import (
    Compile,
    ContextParallel,
    ContextParallelStrategy,
    HybridStrategy,
    TensorParallel,
    Zero,
)
from tests.rank_process import leave_group
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.tiers import sampled
from tests.trainers import trainer

WORDS, WIDTH = 19, 16


def tokens(length: int) -> Tensor:
    return torch.randint(1, WORDS, (4, length), generator=torch.Generator().manual_seed(length))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Plain(LightningModule):
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

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def batches(lengths: tuple[int, ...] = (9, 12)) -> DataLoader[Any]:
    return DataLoader([(tokens(length), torch.arange(4) % 3) for length in lengths], batch_size=None)


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


def trained(make_strategy: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
    warnings.simplefilter("ignore")  # Lightning's, of a batch_size that it guesses
    torch.manual_seed(0)
    module, run = Asks().double(), trainer(made(make_strategy), max_epochs=2)
    run.fit(module, batches(), batches((7,)))
    return {name: float(value) for name, value in run.callback_metrics.items()}, dict(module.state_dict())


LAYOUTS = {
    "cp": (2, partial(ContextParallelStrategy, 2)),
    "tp and cp": (4, partial(HybridStrategy, ContextParallel(2), TensorParallel(2))),
    "zero 3 over cp": (2, partial(HybridStrategy, ContextParallel(2), Zero(1, stage=3))),
}


@sampled(1, "layout", LAYOUTS)
def test_gradients_that_a_step_takes_are_complete(layout: str) -> None:
    ranks, strategy = LAYOUTS[layout]
    assert_like_one_device(trained, ranks, (None,), (strategy,), rtol=1e-8, atol=1e-10)


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


def refused() -> None:
    run = trainer(COMPILED_LAYOUTS["cp"](), max_epochs=1, limit_val_batches=0)
    warnings.simplefilter("ignore")
    with pytest.raises(RuntimeError, match=r"(?s)parameters in a compiled block.*leave out Compile"):
        run.fit(AsksOfBlocks().double(), batches())


def test_gradients_of_compiled_partial_sums_are_refused() -> None:
    run_on_ranks(2, refused)


def validated(lengths: tuple[int, ...], make_strategy: Any, allowed: int = 1) -> tuple[float, int]:
    if make_strategy is None:
        leave_group()
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=allowed):
        (found,) = trainer(made(make_strategy)).validate(Deep().double(), batches(lengths))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] if make_strategy else 0
    return found["val_loss"], graphs


@pytest.mark.parametrize(
    ("lengths", "layout", "allowed"),
    [((8,), "tp", 3), pytest.param((8, 6), "cp", 1, marks=pytest.mark.exhaustive)],
)
def test_blocks_share_a_graph_up_to_the_recompile_limit(lengths: tuple[int, ...], layout: str, allowed: int) -> None:
    ((expected, _),) = run_on_ranks(1, validated, lengths, None)
    for found, graphs in run_on_ranks(2, validated, lengths, COMPILED_LAYOUTS[layout], allowed):
        assert found == pytest.approx(expected, rel=1e-9)
        assert graphs == {"tp": 2, "cp": 1}[layout]  # under tp the first block gets what is not divided
