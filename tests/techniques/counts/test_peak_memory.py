"""The most bytes that a rank holds at one time in a step, within five per cent of closed forms.

A tower of equal layers without biases: each keeps its result for backward, which is the input of the next. Counted are
all storages that live on the rank, in the fourth step, when there are states. AdamW is fused: it makes nothing beside.
Lightning sets gradients to zero between a step's forward and its backward, so those of the step before count with the
activations. A pipeline computes gradients in its step, so it holds those of two steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import DataParallel, HybridStrategy, PipelineParallel, Zero
from lightning_parallel.collectives.point_to_point import IN_FLIGHT as SENT
from lightning_parallel.techniques.gradients.buckets import IN_FLIGHT
from lightning_parallel.techniques.pipeline_parallel.schedule.actions import ActionKind
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import SCHEDULES, Schedule, make_schedule
from lightning_parallel.techniques.technique import Technique
from lightning_parallel.techniques.zero import states
from lightning_parallel.techniques.zero.sharded import parameters
from tests.benchmarks.interleaved import Repeated
from tests.gpu import on_gpu
from tests.live import LiveBytes, reachable
from tests.ranks import POOL, run_on_ranks
from tests.tiers import sampled
from tests.trainers import trainer

STEP = 3
BUCKET, UNIT = 4, 2  # layers


@pytest.fixture(scope="module", autouse=True)
def fresh_ranks() -> None:
    """What earlier tests left reachable on a rank must not count."""
    POOL.kill()


@dataclass(frozen=True)
class Tower:
    """So many layers, whose width gives the bytes of a parameter, and so many samples."""

    layers: int
    width: int
    samples: int

    @property
    def layer(self) -> int:
        return 4 * self.width**2

    @property
    def activation(self) -> int:
        return 4 * self.samples * self.width


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu_()


class Towering(LightningModule):
    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(tower.width) for _ in range(tower.layers))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Peak(Callback):
    """Of all storages that live on this rank, whose device is the host."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEP:
            self.live = LiveBytes(reachable())
            self.live.__enter__()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *rest: Any) -> None:
        if rest[-1] == STEP:
            self.live.__exit__(None, None, None)
            self.bytes = self.live.peak


class PeakOfGpu(Callback):
    """What torch had given out at once of the GPU's memory, less what products work in."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEP:
            gc.collect()  # what earlier fits of this process left in cycles
            with_them = torch.cuda.memory_allocated()
            torch._C._cuda_clearCublasWorkspaces()
            self.workspaces = with_them - torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *rest: Any) -> None:
        if rest[-1] == STEP:
            self.bytes = torch.cuda.max_memory_allocated() - self.workspaces


def peak(tower: Tower, technique: Technique | None, readers: int, gpu: bool = False) -> int:
    peak, small = PeakOfGpu() if gpu else Peak(), {"BUCKET_BYTES": BUCKET * tower.layer}
    shared = {"parallel_devices": [torch.device("cuda", 0)] * readers} if gpu else {}
    run = {"barebones": True, "log_every_n_steps": None, "max_steps": STEP + 2, "callbacks": [peak]}
    with (
        mock.patch.multiple(states, **small),
        mock.patch.object(parameters, "UNIT_BYTES", UNIT * tower.layer),
        mock.patch.object(states, "IN_PLACE_BYTES", tower.layer),
    ):
        strategy = "auto" if technique is None else HybridStrategy(technique, **shared)
        run |= {"accelerator": "cuda"} if gpu else {}
        data = Repeated((tower.width,), tower.samples * readers * (STEP + 2))
        trainer(strategy, 1 if gpu or technique is None else None, **run).fit(
            Towering(tower), DataLoader(data, tower.samples)
        )
    return peak.bytes


WIDE, LONG = Tower(16, 256, 16), Tower(16, 256, 1024)
"""One in which parameters count most, and one in which activations do."""


@dataclass(frozen=True)
class Bytes:
    """The sizes in the closed forms: all parameters, all activations with the batch, one of each, a bucket, a unit."""

    of_all: int
    kept: int
    layer: int
    activation: int
    bucket: int
    unit: int

    @classmethod
    def of(cls, tower: Tower) -> Bytes:
        kept = (tower.layers + 1) * tower.activation
        bucket, unit = BUCKET * tower.layer, UNIT * tower.layer
        return cls(tower.layers * tower.layer, kept, tower.layer, tower.activation, bucket, unit)


def one_device(b: Bytes, d: int) -> float:
    """Parameters, gradients of the step before, two states; and all activations, when the forward ends."""
    return 4 * b.of_all + b.kept


def data_parallel(b: Bytes, d: int) -> float:
    """Gradients live in the messages. In backward comes one that is new, and the gradient of a layer's input."""
    return one_device(b, d) + b.layer + b.activation


def zero_1_and_2(b: Bytes, d: int) -> float:
    """Shards of gradients and states. In backward messages come: one as it starts, then those that may be under way.

    The forward still has the gradients of the step before, backward none of them until its first message is reduced.
    The last that may be is sent before the first is waited for. Over gloo a rank receives the parts of all others
    beside its message.
    """
    starts = b.kept + max(0, b.activation + b.bucket - b.of_all / d)
    ends = (IN_FLIGHT + 1) * b.bucket * (2 - 1 / d)
    return b.of_all * (1 + 3 / d) + max(starts, ends)


def zero_3(b: Bytes, d: int) -> float:
    """Everything in shards. As the forward ends, one unit whole and the next as it came and as it is taken apart.

    As backward ends, one unit came ahead, one is a message of gradients, and what is received of it is almost a third.
    """
    return 4 * b.of_all / d + 3 * b.unit + max(b.kept, b.layer)


Form = Callable[[Bytes, int], float]
FORMS: dict[str, tuple[Callable[[int], Technique | None], Form]] = {
    "one device": (lambda d: None, one_device),
    "data parallel": (lambda d: DataParallel(), data_parallel),
    "zero 1": (lambda d: Zero(stage=1), zero_1_and_2),
    "zero 2": (lambda d: Zero(stage=2), zero_1_and_2),
    "zero 3": (lambda d: Zero(stage=3), zero_3),
}
CELLS = [("zero 3", 2, LONG), ("one device", 1, LONG), ("data parallel", 2, WIDE), ("zero 1", 2, WIDE)]
CELLS += [("zero 3", 4, WIDE), ("zero 2", 4, LONG), ("data parallel", 4, LONG), ("zero 2", 2, WIDE)]


@sampled(1, ("name", "d", "tower"), CELLS)
def test_step_holds_what_the_closed_form_says(name: str, d: int, tower: Tower) -> None:
    technique, form = FORMS[name]
    for found in run_on_ranks(d, peak, tower, technique(d), d):
        assert found == pytest.approx(form(Bytes.of(tower), d), rel=0.05)


BIG = {"wide": Tower(16, 2048, 16), "long": Tower(16, 2048, 16384)}
"""The same two, so large that what a device gives out in blocks, and works in, does not count."""


@on_gpu
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("tower", BIG)
def test_step_on_a_gpu_holds_what_the_closed_form_says(name: str, tower: str) -> None:
    technique, form = FORMS[name]
    d = 1 if name == "one device" else 2
    for found in run_on_ranks(d, peak, BIG[tower], technique(d), d, gpu=True):
        assert found == pytest.approx(form(Bytes.of(BIG[tower]), d), rel=0.05)


RANKS, MICROBATCHES = 4, 8
DEEP = Tower(64, 64, 1024 * MICROBATCHES)


def most_kept(schedule: Schedule, rank: int, layers: int) -> int:
    """Of activations of a microbatch, the most that a rank keeps at one time: it works through its order.

    A forward keeps the result of each layer and, but for the first stage, what it received. Half a backward adds the
    gradient of each layer's result, which the other half needs; in the first stage only that of the stage's.
    """
    of_stage, kept, most = layers // schedule.stages, 0, 0
    for action in schedule.computations[rank]:
        first = action.stage == 0
        forward, half = of_stage + (not first), 1 if first else of_stage
        kept += {ActionKind.F: forward, ActionKind.B: -forward, ActionKind.I: half, ActionKind.W: -half - forward}[
            action.kind
        ]
        most = max(most, kept)
    return most


def pipeline(tower: Tower, schedule: Schedule, rank: int) -> float:
    """Parameters, states, gradients of two steps of its layers, the batch; and what it keeps, sends and makes of it.

    Or, where parameters count most, the gradients of one microbatch in one stage before they are added.
    """
    of_rank, of_stage = (tower.layers * tower.layer / count for count in (RANKS, schedule.stages))
    kept = most_kept(schedule, rank, tower.layers) + SENT + 1
    return 5 * of_rank + tower.activation + max(kept * tower.activation / MICROBATCHES, of_stage)


PIPELINES = [("1f1b", DEEP), ("1f1b", WIDE), *((name, DEEP) for name in SCHEDULES if name != "1f1b")]


@pytest.mark.parametrize(
    ("name", "tower"), [PIPELINES[0], *(pytest.param(*cell, marks=pytest.mark.exhaustive) for cell in PIPELINES[1:])]
)
def test_step_of_a_pipeline_holds_what_its_order_says(name: str, tower: Tower) -> None:
    schedule = make_schedule(name, RANKS, MICROBATCHES)
    technique = PipelineParallel(RANKS, schedule=name, microbatches=MICROBATCHES)
    for rank, found in enumerate(run_on_ranks(RANKS, peak, tower, technique, 1)):
        assert found == pytest.approx(pipeline(tower, schedule, rank), rel=0.05), f"rank {rank}"
