"""A small module to which something happens at one place, and the layouts on which tests of faults train it."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.layouts import layouts

LAYOUTS = layouts("data parallel", "zero 2", "zero 3", "pipeline", "tensor parallel")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Regression(LightningModule):
    """Calls `event` at one place of the second batch, e.g. "training_step"."""

    def __init__(self, place: str = "", event: Callable[[LightningModule], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.place, self.event = place, event

    def at(self, place: str, batch_idx: int) -> None:
        if place == self.place and batch_idx == 1 and self.event is not None:
            self.event(self)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.at("on_train_batch_start", batch_idx)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.at("training_step", batch_idx)
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.at("on_train_batch_end", batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), batch_size=2)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def fail(_: LightningModule) -> None:
    raise ValueError("a user's mistake")


def fail_on(rank: int, module: LightningModule) -> None:
    if module.global_rank == rank:
        fail(module)
