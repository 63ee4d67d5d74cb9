"""What a strategy does on the host in one step, in counts, which do not depend on the load: messages, calls, files.

The model is a chain of linear layers that logs nothing. Calls are those of this package's functions, and of the
functions of Python that they call.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_parallel
from lightning_parallel import (
    DataParallelStrategy,
    PipelineParallelStrategy,
    ZeroStrategy,
)
from tests.benchmarks.delaying import BACKEND, Pace, pretended
from tests.benchmarks.interleaved import Repeated
from tests.benchmarks.overlap import first_stage
from tests.live import uncollected
from tests.tiers import sampled
from tests.trainers import trainer

pytestmark = pytest.mark.filterwarnings("ignore")

PACKAGE = str(Path(lightning_parallel.__file__).parent)
STEP = 4  # by then everything that happens once has happened
GROUP: dict[str, Any] = {"process_group_backend": BACKEND}


class Chain(LightningModule):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.network = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.network(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Logs(Chain):
    """Classifies, and logs its loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


class Counts(Callback):
    """Counts in one step, from the start of its batch to that of the next."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.of: Counter[str] = Counter()
        self.functions: Counter[tuple[str, str]] = Counter()  # of ours
        self._pace, self._before = pace or Pace(), 0

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEP:
            self._before = self._pace.messages
            sys.setprofile(self._note)
        elif batch_idx == STEP + 1:
            sys.setprofile(None)
            self.of["messages"] = self._pace.messages - self._before

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.of["all"] += 1
            code = frame.f_code
            if code.co_filename.startswith(PACKAGE):
                self.of["ours"] += 1
                self.functions[code.co_filename, getattr(code, "co_qualname", code.co_name)] += 1  # since Python 3.11


def counts(make_strategy: Callable[[], Strategy], layers: int, batch: int = 4) -> Counter[str]:
    pace = Pace(alpha=0.0, on=True)
    found = Counts(pace)
    with pretended(2, pace), first_stage(), uncollected():
        run = {"barebones": True, "log_every_n_steps": None, "max_epochs": 1, "callbacks": [found]}
        trainer(make_strategy(), 2, **run).fit(Chain(layers), DataLoader(Repeated((8,), batch * 2 * (STEP + 2)), batch))
    return found.of


# Messages of a step; calls more than with DDP, by four parameters and by each one more, of ours and of all in Python.
UNSEEN = GROUP | {"nonfinite": "continue"}  # without the look at gradients before each step, which costs the difference
MOST: dict[str, tuple[Callable[[], Strategy], int, int, int]] = {
    "data parallel": (lambda: DataParallelStrategy(**UNSEEN), 3, 160, 8),
    "zero 2": (lambda: ZeroStrategy(stage=2, **UNSEEN), 4, 435, 25),
    "zero 2, finite": (lambda: ZeroStrategy(stage=2, **GROUP), 5, 485, 25),
}

OLDER = 0 if torch.__version__ >= (2, 13) else 5  # calls that torch 2.11 makes in each step


@sampled(1, "name", MOST)
def test_messages_and_calls_of_a_step(name: str) -> None:
    make_strategy, messages, over_ddp, by_parameter = MOST[name]
    small, large = counts(make_strategy, 2), counts(make_strategy, 12)
    ddp = counts(lambda: DDPStrategy(**GROUP), 2), counts(lambda: DDPStrategy(**GROUP), 12)
    assert small["messages"] == large["messages"] == messages
    assert small["all"] - ddp[0]["all"] <= over_ddp + OLDER
    assert (large["all"] - small["all"] - ddp[1]["all"] + ddp[0]["all"]) / 20 <= by_parameter


def test_files_and_functions_of_a_plain_step() -> None:
    passed, data = Counts(), TensorDataset(torch.randn(64, 8), torch.arange(64) % 8)
    with pretended(2, Pace(alpha=0.0, on=True)):
        run: dict[str, Any] = {"max_epochs": 1, "callbacks": [passed]}
        trainer(DataParallelStrategy(**GROUP), 2, **run).fit(Logs(3), DataLoader(data, 4))
    assert 0 < len({file for file, _ in passed.functions}) <= 16
    assert 0 < len(passed.functions) <= 120


def piped(microbatches: int) -> Counter[str]:
    """On the first of two stages, with two of four layers, one sample in each microbatch."""
    return counts(lambda: PipelineParallelStrategy(microbatches=microbatches, **GROUP), 4, batch=microbatches)


def test_calls_of_a_microbatch() -> None:
    few, many = piped(4), piped(12)
    assert (many["messages"] - few["messages"]) / 8 == 2
    assert (many["all"] - few["all"]) / 8 <= 430
    assert (many["ours"] - few["ours"]) / 8 <= 215
