"""What a step logs is the value at that moment: changed in place later, a part of a parameter, or a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.layouts import layouts
from tests.rank_process import leave_group
from tests.ranks import begun_on_one, run_on_ranks
from tests.tiers import sampled
from tests.trainers import trainer


class Logs(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scales, self.temperature = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor(0.5))

    def forward(self, batch: Tensor) -> Tensor:
        hidden = batch
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return hidden

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self(batch)
        loss = hidden.square().mean() * self.scales[0] + self.temperature * self.scales[1]
        self.log("scale", self.scales[0])
        self.log("temperature", self.temperature, on_epoch=True)
        self.log("weight", self.blocks[0].weight[0, 0])
        self._log_and_change("loss", loss.detach().clone())
        self._log_and_change("mean", nn.functional.mse_loss(hidden, batch).detach())
        self._log_and_change("constant", torch.ones(()))
        weight = torch.tensor(2.0)  # as many as a rank or a microbatch has samples, by chance
        assert len(batch) == weight or len(batch) == 4
        self.log_dict({"weight of a part": weight, "part": weight * hidden.square().mean()}, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._log_and_change("val_mean", nn.functional.mse_loss(self(batch), batch))
        self.log("val_scale", self.scales[0])
        self.log("val_temperature", self.temperature.detach())
        self.log("val_weight", self.blocks[0].weight[0, 0])

    def _log_and_change(self, name: str, value: Tensor) -> None:
        self.log(name, value, on_step=True, on_epoch=True)
        value.mul_(100)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Noted(Callback):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self.on_train_batch_end(trainer)


def logged(make_strategy: Callable[[], Any] | None, batch: int) -> list[dict[str, float]]:
    if make_strategy is None:
        leave_group()
    torch.manual_seed(0)
    samples, noted = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).double(), Noted()
    run = trainer(make_strategy() if make_strategy else "auto", max_epochs=2, callbacks=[noted])
    run.fit(Logs().double(), DataLoader(samples, batch), DataLoader(samples[:8], batch))
    return noted.metrics


LAYOUTS = layouts("data parallel", "zero 2", "zero 3", "tensor parallel", "pipeline")


@sampled(2, "name", LAYOUTS)
def test_values_are_those_of_one_device(name: str) -> None:
    begun = begun_on_one(logged, None, 4)
    ranks, readers, strategy = LAYOUTS[name]
    for metrics in run_on_ranks(ranks, logged, strategy, 4 // readers):
        for found, expected in zip(metrics, begun.result(), strict=True):
            assert found == pytest.approx(expected, rel=1e-6)
