"""Parameters that divide badly, beside each other: scalars, heads of one row, none at all, uneven shards of parts."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_parallel import (
    ActivationCheckpoint,
    PipelineParallel,
    TensorParallel,
    Zero,
    ZeroStrategy,
)
from tests.layouts import Layout, hybrid, layouts
from tests.strategies.between_steps.chains import LENGTH, WIDTH, Chain, Kind, check
from tests.tiers import sampled

WIDE, HEADS = 15, 5


class Trains(Chain):
    options = {"max_epochs": 1}

    def __init__(self) -> None:
        LightningModule.__init__(self)
        torch.manual_seed(0)
        self.seen = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Few(Trains):
    """A head of one row before a scalar, which no rank divides, and a table without rows."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by, self.nothing = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by.exp() + self.nothing.sum()

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.scale = nn.Linear(WIDTH, 8), nn.Linear(8, 1), self.Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.head(self.body(x).relu()))


class Layer(nn.Module):
    """Attention with one head of keys and values, three rows: ranks have two and one, of which some have none."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, WIDE)
        self.k, self.v = (nn.Linear(WIDE, WIDE // HEADS, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(WIDE, 31), nn.Linear(31, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        heads = (f(x).unflatten(-1, (-1, WIDE // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k, v = heads
        k, v = (t.repeat_interleave(HEADS, 1) for t in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Uneven(Trains):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, WIDE - WIDTH))
        for layer in self.layers:
            x = layer(x)
        return x


class Rare(Trains):
    """A complex parameter and a scalar that some ranks do not use, a buffer of a dtype that no backend sends."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.turn = nn.Linear(WIDTH, 1), nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.by = nn.Parameter(torch.ones(()))
        self.register_buffer("order", torch.arange(4, dtype=torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        y, far = self.head(x), x[..., :1] > 1.5
        return y + far * self.by * self.turn[self.order.long()].abs().sum() if far.any() else y


class Once(Trains):
    """A layer that one sample needs, of all the batches that a step takes."""

    options = {"max_epochs": 1, "accumulate_grad_batches": 2}

    def __init__(self) -> None:
        super().__init__()
        self.needed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        samples = torch.randn(self.samples, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
        self.first = samples.flatten()[0].item()

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[..., :1] == self.first
        return self.head(torch.where(chosen, self.needed(x), x) if chosen.any() else x)


PP2 = PipelineParallel(2, microbatches=2)
LAYOUTS = {
    "replicated zero 2": Layout(4, 4, hybrid(Zero(2, replicate=2, stage=2))),
    **layouts("zero 1", "tensor x data parallel", "data parallel of 4"),
    "zero 2 of 3": Layout(3, 3, partial(ZeroStrategy, stage=2)),
    "tensor x zero 3": Layout(4, 2, hybrid(TensorParallel(2), Zero(2), ActivationCheckpoint())),
    "zero 3 of 3": Layout(3, 3, ZeroStrategy),
    "zero 3 of 4": Layout(4, 4, ZeroStrategy),
    "replicated zero 3": Layout(4, 4, hybrid(Zero(2, replicate=2))),
    "pipeline x tensor, sequence whole": Layout(4, 1, hybrid(TensorParallel(2, sequence_parallel=False), PP2)),
    "pipeline x tensor": Layout(4, 1, hybrid(TensorParallel(2), PP2)),
}


@sampled(3, "layout", LAYOUTS)
def test_odd_parameters_train_as_on_one_device(layout: str) -> None:
    kinds: list[Kind] = [Few, Rare, *([Once] if "replicated" in layout else [])]
    if "tensor" in layout:
        kinds = [Uneven]
    check(kinds, LAYOUTS[layout])
