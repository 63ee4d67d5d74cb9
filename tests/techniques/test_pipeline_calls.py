"""Calls of the library's functions in one step of a pipeline: host time that counts once for each microbatch."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_parallel
from lightning_parallel import PipelineParallelStrategy
from tests.models import PlainBlock
from tests.ranks import run_on_ranks
from tests.trainers import trainer

PACKAGE = str(Path(lightning_parallel.__file__).parent)
MOST = 1200
COUNTED = 3  # a batch by which all that happens once has happened


class Plain(LightningModule):
    """Four blocks between a map and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(PlainBlock(16, 32) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.stem(batch)
        for block in self.blocks:
            x = block(x)
        loss = self.head(x).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class Calls(Callback):
    """Counts the calls in one step, from the start of its batch to that of the next."""

    def __init__(self) -> None:
        self.of_function: Counter[str] = Counter()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        sys.setprofile(self.note if batch_idx == COUNTED else None)

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            self.of_function[f"{code.co_filename[len(PACKAGE) + 1 :]}:{code.co_qualname}"] += 1


def counted() -> Counter[str]:
    calls = Calls()
    run = trainer(PipelineParallelStrategy(2, microbatches=4), max_epochs=1, callbacks=[calls])
    run.fit(Plain(), DataLoader(torch.randn(48, 16), 8))
    return calls.of_function


def test_the_last_stage_calls_few_functions_of_the_library() -> None:
    last = run_on_ranks(2, counted)[1]
    assert 0 < last.total() <= MOST, last.most_common(30)
