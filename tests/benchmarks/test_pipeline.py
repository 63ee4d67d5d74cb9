"""How close the steps of a pipeline come to the time that their schedule allows, with stages that sleep.

What a step takes beyond its schedule is what we add to it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import PipelineParallelStrategy
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import SCHEDULES, Schedule, make_schedule
from lightning_parallel.techniques.pipeline_parallel.schedule.simulate import simulate
from tests.benchmarks.interleaved import ROUNDS, Repeated, markdown, show
from tests.benchmarks.overlap import SleepForWeight, SleepInForward
from tests.ranks import run_on_ranks
from tests.trainers import trainer

pytestmark = [pytest.mark.benchmark, pytest.mark.filterwarnings("ignore")]

GOALS = {"gpipe": "1.10", "1f1b": "1.10", "interleaved_1f1b": "1.10", "looped_bfs": "1.10"}
SECONDS = float(os.environ.get("SECONDS_ASLEEP", "0.06"))
WIDTH = 8


class Block(nn.Module):
    """Adds its weight, after a nap; both gradients take one each, in nodes of their own."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return SleepInForward.apply(x, self.seconds) + SleepForWeight.apply(self.weight, self.seconds)


class Sleeper(LightningModule):
    """Blocks that sleep, after a parameter for which the first of them computes its input gradient too."""

    def __init__(self, blocks: int, seconds: float) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList(Block(seconds) for _ in range(blocks))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        x = x + self.start
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class StepTimes(Callback):
    """The wall time of every step: batch, schedule, backward and optimizer, begun by all ranks at once."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        dist.barrier()
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *rest: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


@dataclass(frozen=True)
class Pipeline:
    """A schedule, and how long F, I and W of one rank's layers sleep for one microbatch."""

    name: str
    ranks: int
    microbatches: int

    @property
    def schedule(self) -> Schedule:
        return make_schedule(self.name, self.ranks, self.microbatches)

    def fit(self, steps: int) -> list[float]:
        """On a rank: the wall time of each step but for the first one, which tells the stages their shapes."""
        torch.manual_seed(0)
        times, stages = StepTimes(), self.schedule.stages
        strategy = PipelineParallelStrategy(schedule=self.name, microbatches=self.microbatches)
        data = DataLoader(Repeated((WIDTH,), self.microbatches * (1 + steps)), self.microbatches)
        one = trainer(strategy, callbacks=[times], barebones=True, log_every_n_steps=None, max_epochs=1)
        one.fit(Sleeper(stages, SECONDS * self.ranks / stages), data)
        return times.seconds[1:]


def in_rounds(pipelines: Sequence[Pipeline], steps: int, rounds: int) -> list[list[float]]:
    measured: list[list[float]] = [[] for _ in pipelines]
    for number in range(rounds):
        for index in list(range(len(pipelines)))[:: -1 if number % 2 else 1]:
            measured[index] += pipelines[index].fit(steps)
    return measured


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (8, 16)])
def test_steps_of_stages_that_sleep(capsys: pytest.CaptureFixture[str], ranks: int, microbatches: int) -> None:
    pipelines, before = [Pipeline(name, ranks, microbatches) for name in SCHEDULES], os.getloadavg()[0]
    call = in_rounds, pipelines, 2, max(1, ROUNDS // 4)
    by_rank = run_on_ranks(ranks, *call, timeout=300.0, limit=3600.0)
    slowest = [[max(step) for step in zip(*of_ranks, strict=True)] for of_ranks in zip(*by_rank, strict=True)]
    bounds = {each.name: simulate(each.schedule, (SECONDS, SECONDS, SECONDS)).step for each in pipelines}
    steps = dict(zip(bounds, map(statistics.median, slowest), strict=True))
    rows = [["schedule", "bound, ms", "step, ms", "step / bound", "lowest", "goal", "step / that of 1f1b", "bound"]]
    for (name, bound), seconds in zip(bounds.items(), slowest, strict=True):
        numbers = f"{1000 * bound:.0f}", f"{1000 * steps[name]:.0f}"
        ratios = f"{steps[name] / bound:.3f}", f"{min(seconds) / bound:.3f}", GOALS.get(name, "1.20")
        rows.append([name, *numbers, *ratios, f"{steps[name] / steps['1f1b']:.3f}", f"{bound / bounds['1f1b']:.3f}"])
    said = f"{len(slowest[0])} steps each, load {before:.0f} to {os.getloadavg()[0]:.0f}"
    title = f"F = I = W = {1000 * SECONDS:.0f} ms asleep, {ranks} ranks, {microbatches} microbatches"
    show(capsys, title, [said, markdown(rows)])
