"""Parameters that divide badly, beside each other: scalars, heads of one row, none at all, uneven shards of parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    ActivationCheckpoint,
    DataParallel,
    DataParallelStrategy,
    HybridStrategy,
    PipelineParallel,
    TensorParallel,
    Zero,
    ZeroStrategy,
)
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import assert_like_one_device, made, require_like
from tests.tiers import sampled
from tests.trainers import trainer

WIDTH, HEADS = 15, 5


class Trains(LightningModule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self(batch[0]) - 1).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by, self.nothing = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by.exp() + self.nothing.sum()


class Few(Trains):
    """A head of one row before a scalar, which no rank divides, and a table without rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.scale = nn.Linear(WIDTH, 8), nn.Linear(8, 1), Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.head(self.body(x).relu()))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention with one head of keys and values, three rows: ranks have two and one, of which some have none."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // HEADS, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 31), nn.Linear(31, WIDTH)
        self.join = nn.Linear(2 * WIDTH, WIDTH) if skips else None

    def forward(self, x: Tensor, skipped: Tensor | None = None) -> Tensor:
        if self.join is not None and skipped is not None:
            x = self.join(torch.cat([x, skipped], -1))
        heads = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k, v = heads
        k, v = (t.repeat_interleave(HEADS, 1) for t in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Uneven(Trains):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack((x, x.flip(1)), 1)
        for layer in self.layers:
            x = layer(x)
        return x


class Skips(Trains):
    """What the first layers return goes to the last ones too, as in a U-Net: of these a pipeline makes its blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up = (nn.ModuleList(Layer(skips) for _ in range(2)) for skips in (False, True))

    def forward(self, x: Tensor) -> Tensor:
        x, skipped = torch.stack((x, x.flip(1)), 1), []
        for layer in self.down:
            skipped.append(x := layer(x))
        for layer in self.up:
            x = layer(x, skipped.pop())
        return x


class Rare(Trains):
    """A complex parameter and a scalar that some ranks do not use, a buffer of a dtype that no backend sends."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.turn = nn.Linear(WIDTH, 1), nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.by = nn.Parameter(torch.ones(()))
        self.register_buffer("order", torch.arange(4, dtype=torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        y, far = self.head(x), x[:, :1] > 1
        return y + far * self.by * self.turn[self.order.long()].abs().sum() if far.any() else y


def all_samples() -> Tensor:
    return torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1))


class Once(Trains):
    """A layer that one sample needs, of all the batches that a step takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.first = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), all_samples()[0, 0].item()

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :1] == self.first
        return self.head(torch.where(chosen, self.layer(x), x) if chosen.any() else x)  # type: ignore[no-any-return]


def trained(kind: type[Trains], strategy: Any, batch_size: int, **options: Any) -> Any:
    module, samples = kind(), all_samples()
    run = trainer(made(strategy), precision="64-true", max_epochs=1, **options)
    run.fit(module, DataLoader(TensorDataset(samples), batch_size))
    return {name: value.clone() for name, value in module.state_dict().items()}


def hybrid(*techniques: Any) -> Any:
    return partial(HybridStrategy, *techniques)


@sampled(
    1,
    ("kind", "ranks", "readers", "strategy"),
    [
        (Few, 2, 2, partial(ZeroStrategy, stage=1)),
        (Few, 2, 2, partial(ZeroStrategy, stage=3)),
        (Few, 3, 3, partial(ZeroStrategy, stage=2)),
        (Few, 3, 3, partial(ZeroStrategy, stage=3)),
        (Few, 4, 4, hybrid(Zero(2, replicate=2))),
        (Rare, 4, 4, DataParallelStrategy),
        (Rare, 4, 4, partial(ZeroStrategy, stage=1)),
        (Rare, 4, 4, hybrid(Zero(2, replicate=2, stage=2))),
        (Rare, 4, 4, ZeroStrategy),
        (Uneven, 4, 2, hybrid(TensorParallel(2), Zero(2))),
        (Uneven, 4, 2, hybrid(TensorParallel(2), Zero(2), ActivationCheckpoint())),
        (Uneven, 4, 2, hybrid(TensorParallel(2), DataParallel(2))),
        (Skips, 4, 1, hybrid(TensorParallel(2), PipelineParallel(2, microbatches=2))),
        (Skips, 4, 1, hybrid(TensorParallel(2, sequence_parallel=False), PipelineParallel(2, microbatches=2))),
    ],
)
def test_odd_parameters_train_as_on_one_device(kind: type[Trains], ranks: int, readers: int, strategy: Any) -> None:
    assert_like_one_device(trained, ranks, (kind, None, 12), (kind, strategy, 12 // readers))


@sampled(1, "stage", [1, 2, 3])
def test_replicas_step_what_only_one_of_them_used(stage: int) -> None:
    expected = begun_on_one(trained, Once, None, 8, accumulate_grad_batches=3)
    strategy = hybrid(Zero(2, replicate=2, stage=stage))
    for found in run_on_ranks(4, trained, Once, strategy, 2, accumulate_grad_batches=3):
        require_like(expected.result(), found)
