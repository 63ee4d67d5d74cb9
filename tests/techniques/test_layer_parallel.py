"""A pipeline of one microbatch: what a model does to gradients within its blocks is done to those of one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import HybridStrategy, LayerParallelStrategy, PipelineParallel, TensorParallel
from tests.models import Optimized, adamw
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, made, require_like
from tests.tiers import sampled
from tests.trainers import trainer


class Block(nn.Module):
    """Clamps the gradients that pass through it: what is left of them depends on how large they are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).tanh())
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return x


class Clamps(Optimized):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.make_optimizer = nn.ModuleList(Block() for _ in range(4)), adamw

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(x, y)


def trained(strategy: MakeStrategy | None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(6, (22,), generator=generator).index_fill(0, torch.tensor([3, 4, 9]), -100)
    data = TensorDataset(torch.randn(22, 6, generator=generator), targets)
    module = Clamps()
    trainer(made(strategy), max_epochs=2).fit(module, DataLoader(data, 8))  # of the last batch six
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


LAYOUTS: dict[str, tuple[int, Any]] = {
    "alone": (2, partial(LayerParallelStrategy, 2)),
    "tensor parallel": (4, partial(HybridStrategy, PipelineParallel(2, microbatches=1), TensorParallel(2))),
}


@sampled(1, "layout", LAYOUTS)
def test_gradients_have_the_size_of_one_device(layout: str) -> None:
    ranks, strategy = LAYOUTS[layout]
    expected = begun_on_one(trained, None)
    for found in run_on_ranks(ranks, trained, strategy):
        require_like(expected.result(), found)
