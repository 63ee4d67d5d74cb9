"""The analysis of a step before a pipeline runs leaves no trace in the parts of the module."""

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import HybridStrategy, ParallelPlan, PipelineParallel
from tests.models import points
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.trainers import trainer


class State:
    """An object of the user's."""

    calls = 0


class Counts(nn.Module):
    """Warms up by its own count of calls, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.by_size, self.latest, self.state = 0, [], {}, deque(maxlen=2), State()
        self.scale = nn.Parameter(torch.ones(13))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(self.calls))
        self.by_size[len(x)] = self.calls
        self.latest.append(self.calls)
        self.state.calls += 1
        counted = sum(self.seen) + self.by_size[len(x)] + sum(self.latest) + self.state.calls
        return x * self.scale * min(1.0, counted / 40)


class Begins(nn.Module):
    """Makes its weights of the first batch, and remembers in an attribute of Python that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = False
        self.scale = nn.Parameter(torch.ones(13))

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun:
            self.scale.data = 1 / (1 + x.detach().std(0))
            self.begun, self.new = True, 1
        return x * self.scale * self.new


class Remembers(nn.Module):
    """Mixes in what it computed for the batch before."""

    last: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(13))

    def forward(self, x: Tensor) -> Tensor:
        made = x * self.scale if self.last is None else x * self.scale + 0.1 * self.last
        self.last = made.detach()
        return made


class Captures(nn.Module):
    """Hooks a part of its own when it first runs, and notes that in an attribute, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.hooked = nn.Linear(13, 13), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.inner.register_forward_hook(lambda part, args, made: made / 2 + args[0])
            self.hooked = True
        made: Tensor = self.inner(x)
        return made


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(Counts(), Begins(), Remembers(), Captures())
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.parts(batch[0])
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pipeline() -> HybridStrategy:
    return HybridStrategy(PipelineParallel(2, microbatches=1), plan=ParallelPlan(blocks="layers.*"))


def trained(strategy: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module, data = Model(), DataLoader(points(8, seed=1), 4)
    trainer(made(strategy), max_epochs=2, limit_val_batches=0, precision="64-true").fit(module, data)
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def test_attributes_of_parts_are_restored() -> None:
    assert_like_one_device(trained, 2, (None,), (pipeline,), rtol=1e-8, atol=1e-9)


class Written(CSVLogger):
    """A logger that a step writes to itself."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(metrics)


class Writes(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"own": loss.item()}, step=self.global_step)
        return loss


def written(folder: str) -> list[float]:
    logger = Written(folder)
    run = trainer(pipeline(), max_epochs=1, limit_val_batches=0, precision="64-true", logger=logger)
    with pytest.raises((ValueError, RuntimeError), match=r"Written\.log_metrics is called in a step, but loggers"):
        run.fit(Writes(), DataLoader(points(8, seed=1), 4))
    assert run.loggers == [logger]
    return [row["own"] for row in logger.rows if "own" in row]


def test_nothing_is_written_to_loggers(tmp_path: Path) -> None:
    """Neither by an analysis, nor by a step of a pipeline, whose last stage is not the rank that writes."""
    assert run_on_ranks(2, written, str(tmp_path)) == [[], []]
