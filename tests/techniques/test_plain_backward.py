"""Steps of manual optimization that call `backward` themselves train as those that call `manual_backward`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    ContextParallelStrategy,
    DataParallelStrategy,
    HybridStrategy,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import made, require_like
from tests.tiers import covering
from tests.trainers import trainer

WORDS, WIDTH, LENGTH, IGNORED = 11, 8, 6, -100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class ByHand(LightningModule):
    """A mean over targets, of which ranks have different numbers; `back` differs by subclass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.after = 0

    def losses(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).mT, labels, ignore_index=IGNORED), x.square().mean()

    def back(self, batch: list[Tensor]) -> None:
        self.losses(*batch)[0].backward()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.back(batch)
        optimizer.step()

    def on_after_backward(self) -> None:
        self.after += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Twice(ByHand):
    def back(self, batch: list[Tensor]) -> None:
        first, second = self.losses(*batch)
        first.backward(retain_graph=True)
        (second / 2).backward()


class Together(ByHand):
    """Several losses at once, one of them with a gradient of the user's."""

    def back(self, batch: list[Tensor]) -> None:
        first, second = self.losses(*batch)
        torch.autograd.backward([first, second], [torch.tensor(2.0, dtype=first.dtype), None])


class Attacked(ByHand):
    """A pass for a tensor of the step alone, before that for the parameters."""

    def back(self, batch: list[Tensor]) -> None:
        noise = torch.zeros(WIDTH, dtype=self.head.weight.dtype, requires_grad=True)
        (self.head(self.words.weight[:1] + noise).square().mean()).backward(inputs=[noise])
        assert noise.grad is not None
        loss = self.losses(*batch)[0]
        (loss * (1 + noise.grad.square().sum())).backward()


MODELS = {kind.__name__: kind for kind in (ByHand, Twice, Together, Attacked)}
LAYOUTS: dict[str, tuple[int, int, Any]] = {
    "dp": (2, 2, DataParallelStrategy),
    "zero 1": (2, 2, partial(ZeroStrategy, stage=1)),
    "zero 2": (2, 2, partial(ZeroStrategy, stage=2)),
    "zero 3": (2, 2, ZeroStrategy),
    "tp": (2, 1, TensorParallelStrategy),
    "cp": (2, 1, ContextParallelStrategy),
    "tp x zero 3": (4, 2, partial(HybridStrategy, TensorParallel(2), Zero(2))),
}


def trained(strategy: Any, model: str, batch_size: int) -> Any:
    module, generator = MODELS[model](), torch.Generator().manual_seed(1)
    tokens = torch.randint(WORDS, (11, LENGTH), generator=generator)  # the last batch is smaller, and uneven
    labels = tokens.roll(-1, 1).masked_fill(tokens > tokens[:, :1], IGNORED)
    trainer(made(strategy), max_epochs=2, precision="64-true").fit(
        module, DataLoader(TensorDataset(tokens, labels), batch_size)
    )
    return module.after, {name: value.detach().clone() for name, value in module.state_dict().items()}


@covering(keep=1, layout=LAYOUTS, model=MODELS)
def test_they_give_what_one_device_gives(layout: str, model: str) -> None:
    n, readers, strategy = LAYOUTS[layout]
    expected = begun_on_one(trained, None, model, 4)
    for found in run_on_ranks(n, trained, strategy, model, 4 // readers):
        require_like(expected.result(), found)
