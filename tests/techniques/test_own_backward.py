"""A `backward` of the module's own: what it does to gradients counts, as they are final when a pass returns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from lightning_parallel import (
    DataParallel,
    DataParallelStrategy,
    HybridStrategy,
    PipelineParallelStrategy,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from tests.ranks import begun_on_one, run_on_ranks
from tests.tiers import covering
from tests.trainers import trainer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + hidden


class Changing(LightningModule):
    """Halves gradients in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(6, 6), nn.ModuleList(Block() for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = self.stem(batch)
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        if self.global_step % 2:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class Twice(Changing):
    """Runs two passes, and looks at what the first one left."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss / 2).backward(retain_graph=True)
        for parameter in self.stem.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(3)
        super().backward(loss * 2)


class Asking(Changing):
    """Gives gradients that it asks for."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        parameters = list(self.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def weights(kind: type[Changing], batch: int, batches: int, make_strategy: Callable[[], Any] | None = None) -> Any:
    torch.manual_seed(0)
    module, data = kind(), torch.randn(32, 6, dtype=torch.float64)
    run = {"max_epochs": 1, "precision": "64-true", "accumulate_grad_batches": batches}
    trainer("auto" if make_strategy is None else make_strategy(), **run).fit(module, DataLoader(data, batch))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


LAYOUTS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "data parallel": (DataParallelStrategy, 2, 2),
    "zero 1": (partial(ZeroStrategy, stage=1), 2, 2),
    "zero 2": (partial(ZeroStrategy, stage=2), 2, 2),
    "zero 3": (ZeroStrategy, 2, 2),
    "tensor parallel": (TensorParallelStrategy, 2, 1),
    "tensor x data parallel": (partial(HybridStrategy, TensorParallel(2), DataParallel(2)), 4, 2),
    "tensor x zero 1": (partial(HybridStrategy, TensorParallel(2), Zero(2, stage=1)), 4, 2),
}


@covering(keep=2, layout=LAYOUTS, kind=[Changing, Twice], batches=[1, 2])
def test_what_it_does_is_as_on_one_device(layout: str, kind: type[Changing], batches: int) -> None:
    require_as_on_one_device(layout, kind, batches)


@pytest.mark.parametrize("layout", ["data parallel", "zero 1", "zero 2"])
def test_gradients_that_it_gives_become_means(layout: str) -> None:
    require_as_on_one_device(layout, Asking, 1)


def require_as_on_one_device(layout: str, kind: type[Changing], batches: int) -> None:
    strategy, ranks, readers = LAYOUTS[layout]
    expected = begun_on_one(weights, kind, 4, batches)
    for got in run_on_ranks(ranks, weights, kind, 4 // readers, batches, strategy):
        torch.testing.assert_close(got, expected.result(), rtol=1e-9, atol=1e-11)


def test_it_changes_gradients_of_a_stage() -> None:
    expected = begun_on_one(weights, Changing, 4, 1)
    for got in run_on_ranks(2, weights, Changing, 4, 1, PipelineParallelStrategy):
        torch.testing.assert_close(got, expected.result(), rtol=1e-9, atol=1e-11)
