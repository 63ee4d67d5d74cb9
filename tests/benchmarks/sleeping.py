"""A model that sleeps where others compute: what a pipeline's step takes beyond its schedule is what we add to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import PipelineParallelStrategy
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import Schedule, make_schedule
from lightning_parallel.techniques.pipeline_parallel.schedule.simulate import simulate
from tests.benchmarks.interleaved import Repeated
from tests.ranks import run_on_ranks
from tests.trainers import trainer

WIDTH = 8


class SleepInForward(torch.autograd.Function):
    """Takes the time of a forward, and in backward that of an input gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None


class SleepForWeight(torch.autograd.Function):
    """Takes no time in forward, and in backward that of a weight gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None


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
    seconds: float

    @property
    def schedule(self) -> Schedule:
        return make_schedule(self.name, self.ranks, self.microbatches)

    @property
    def bound(self) -> float:
        """The shortest step that the schedule allows."""
        return simulate(self.schedule, (self.seconds, self.seconds, self.seconds)).step

    def fit(self, steps: int) -> list[float]:
        """On a rank: the wall time of each step but for the first one, which tells the stages their shapes."""
        torch.manual_seed(0)
        times, stages = StepTimes(), self.schedule.stages
        strategy = PipelineParallelStrategy(schedule=self.name, microbatches=self.microbatches)
        options = {"barebones": True, "log_every_n_steps": None, "max_epochs": 1}
        data = Repeated((WIDTH,), self.microbatches * (1 + steps))
        one = trainer(strategy, callbacks=[times], **options)
        one.fit(Sleeper(stages, self.seconds * self.ranks / stages), DataLoader(data, self.microbatches))
        return times.seconds[1:]


def _rounds(pipelines: Sequence[Pipeline], steps: int, rounds: int) -> list[list[list[float]]]:
    measured: list[list[list[float]]] = [[] for _ in pipelines]
    for number in range(rounds):
        for index in list(range(len(pipelines)))[:: -1 if number % 2 else 1]:
            measured[index].append(pipelines[index].fit(steps))
    return measured


def measure(pipelines: Sequence[Pipeline], steps: int, rounds: int) -> list[list[float]]:
    """Of each pipeline the wall times of all steps, each that of the slowest rank; rounds are interleaved."""
    by_rank = run_on_ranks(pipelines[0].ranks, _rounds, list(pipelines), steps, rounds, timeout=300.0, limit=3600.0)
    times = []
    for index in range(len(pipelines)):
        ranks = [[seconds for fit in measured[index] for seconds in fit] for measured in by_rank]
        times.append([max(step) for step in zip(*ranks, strict=True)])
    return times
