"""What a strategy hides of its messages: layers sleep in place of computing, on a group whose messages take time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel.techniques.pipeline_parallel.batch_work import BatchWork
from lightning_parallel.techniques.pipeline_parallel.step import BatchResults, PipelineStep
from lightning_parallel.techniques.zero import states
from tests.benchmarks.delaying import Pace, pretended
from tests.benchmarks.interleaved import Repeated
from tests.trainers import trainer

RANKS = 8
LAYERS, ROWS, COLUMNS = 12, 512, 512
NAP = 0.015
BUCKET_MB = 25 / 16
"""Layers are of 1 MiB, and buckets and wire in proportion as for 16 MiB: copies on the host must not be measured."""

BANDWIDTH = 2e9 / 16
WARM_UP, STEPS = 3, 7


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


class SleepForWeight(SleepInForward):
    """Takes no time in forward, and in backward that of a weight gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()


class Layer(nn.Module):
    """A nap in forward, and two in backward, of which its weight's gradient takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        weight = SleepForWeight.apply(self.weight, NAP)
        return SleepInForward.apply(x, NAP) + weight[0, : x.shape[-1]]


class Sleeper(LightningModule):
    """Layers between a stem and a head that cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@dataclass
class Steps:
    """What steps took, in seconds, from the start of one batch to that of the next."""

    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Clock(Callback):
    """Measures the steps but for the first ones."""

    def __init__(self, pace: Pace) -> None:
        self.steps, self._pace, self._last = Steps(), pace, (0.0, 0.0, 0, 0.0)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._pace.on = True
        now = time.perf_counter(), self._pace.busy, self._pace.messages, self._pace.waited
        if batch_idx > WARM_UP:
            for kept, new, old in zip(vars(self.steps).values(), now, self._last, strict=True):
                kept.append(new - old)
        self._last = now

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._pace.on = False


def fit(
    make_strategy: Callable[[], Strategy | str],
    ranks: int = RANKS,
    batches: int = WARM_UP + STEPS + 1,
) -> Steps:
    """What the steps of a short fit took; one rank is a single device."""
    torch.manual_seed(0)
    pace = Pace(bandwidth=BANDWIDTH)
    clock, data = Clock(pace), DataLoader(Repeated((8,), 2 * batches * ranks), 2)
    run = {"max_epochs": 1, "limit_val_batches": 0, "callbacks": [clock], "limit_train_batches": batches}
    with ExitStack() as stack:
        if ranks > 1:
            stack.enter_context(mock.patch.object(states, "BUCKET_BYTES", int(BUCKET_MB * 2**20)))
            stack.enter_context(pretended(ranks, pace))
            stack.enter_context(first_stage())
        trainer(make_strategy(), ranks, **run).fit(Sleeper(), data)
    return clock.steps


@contextmanager
def first_stage() -> Iterator[None]:
    """Inside, what other stages would tell rank 0 is what it would tell: it computes its own stage, and never waits."""

    def shared(_: PipelineStep, work: BatchWork) -> BatchResults:
        return BatchResults(torch.zeros(()), [], work.context.records.collect(), None, None, None, {})

    with (
        mock.patch.object(PipelineStep, "_shared", shared),
        mock.patch.object(dist, "broadcast_object_list", return_value=None),
    ):
        yield
