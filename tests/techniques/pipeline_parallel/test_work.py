"""What a pipeline's ranks do and hold, counted: activations alive, FLOPs, reductions, bytes of parameters."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.flop_counter import flop_registry

import lightning_parallel
from lightning_parallel import DataParallel, HybridStrategy, PipelineParallel, PipelineParallelStrategy, Zero
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import make_schedule
from lightning_parallel.techniques.pipeline_parallel.schedule.simulate import simulate
from lightning_parallel.techniques.tools.absent import Absent
from tests.live import LiveBytes, stepped, uncollected
from tests.models import PlainBlock
from tests.ranks import run_on_ranks
from tests.tiers import sampled
from tests.trainers import trainer

BLOCKS = 8


class Token:
    """Lives as long as the graph of the block in which it was made."""


class Held(torch.autograd.Function):
    alive: weakref.WeakSet[Token] = weakref.WeakSet()
    most = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = Token()
        if not isinstance(x, Absent) and x.requires_grad:
            Held.alive.add(ctx.token)
            Held.most = max(Held.most, len(Held.alive))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Tensor:
        return incoming


class Counted(PlainBlock):
    """The first one's input requires gradients too, so that all blocks count."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not x.requires_grad:
            x.requires_grad_()
        return super().forward(Held.apply(x))


class Tower(LightningModule):
    """Nothing but blocks, all alike."""

    def __init__(self, block: Callable[[], nn.Module], blocks: int = BLOCKS, late: bool = False) -> None:
        super().__init__()
        self.block, self.count = block, blocks
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if "blocks" not in self._modules:
            self.blocks = nn.ModuleList(self.block() for _ in range(self.count))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def data(microbatches: int) -> DataLoader:
    inputs = torch.randn(6 * microbatches, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(inputs, microbatches)


def group_size(arg: Any) -> int:
    is_group = isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
    return dist.ProcessGroup.unbox(arg).size() if is_group else 0


class Work(TorchDispatchMode):
    """FLOPs of real tensors, and messages by the size of the group."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.messages: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.messages[func._opname, next(size for size in map(group_size, args) if size)] += 1
        elif func._overloadpacket in flop_registry and not any(isinstance(a, Tensor) and a.is_meta for a in args):
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


class Watch(Callback):
    """Looks at the second batch, when everything has been set up."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.work = Work()
            self.work.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            self.work.__exit__(None, None, None)


def worked(strategy: Any, samples: int) -> tuple[int, int, dict[tuple[str, int], int]]:
    gc.collect()
    Held.alive.clear()
    Held.most, watch = 0, Watch()
    trainer(strategy(), max_epochs=1, callbacks=[watch]).fit(Tower(partial(Counted, 16, 32)), data(samples))
    return Held.most, watch.work.flops, dict(watch.work.messages)


@sampled(1, "schedule", ["zbv", "1f1b", "gpipe", "interleaved_1f1b"])
def test_activations_and_work_are_those_of_the_schedule(schedule: str) -> None:
    """A split backward is as much work as one; as many microbatches live as the schedule promises."""
    ranks, microbatches = 4, 8
    promised = simulate(make_schedule(schedule, ranks, microbatches)).peak_activations
    strategy = partial(PipelineParallelStrategy, ranks, schedule=schedule, microbatches=microbatches)
    [(_, expected, _)] = run_on_ranks(1, worked, partial(str, "auto"), microbatches)
    found = run_on_ranks(ranks, worked, strategy, microbatches)
    assert [alive for alive, _, _ in found] == [round(peak * BLOCKS / ranks) for peak in promised]
    assert sum(flops for _, flops, _ in found) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("technique", [DataParallel(3), Zero(3, stage=3)], ids=["dp", "3"])
def test_messages_of_other_techniques_come_once_a_batch(technique: Any) -> None:
    few, many = (
        run_on_ranks(6, worked, partial(HybridStrategy, PipelineParallel(2, microbatches=m), technique), 8)
        for m in (1, 4)
    )
    for (*_, one), (*_, four) in zip(few, many, strict=True):
        # with four, the loss is measured once more: losses are gathered, and not scaled by targets before
        among_three = sum(count for (_, ranks), count in one.items() if ranks == 3)
        assert among_three
        assert sum(count for (_, ranks), count in four.items() if ranks == 3) == among_three


class MostLive(Callback):
    """The most bytes that were real up to the end of each batch, in units of what this rank keeps of the model."""

    def __init__(self, live: LiveBytes) -> None:
        self.live, self.most = live, []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        given = [p for p in stepped(trainer.optimizers[0]) if 0 not in p.stride()]
        self.most.append(self.live.peak / sum(p.nbytes for p in given))


def most_live(technique: DataParallel | Zero | None, accumulate: int) -> list[float]:
    count = MostLive(LiveBytes())
    others = [] if technique is None else [technique]
    options = {"limit_train_batches": 4, "accumulate_grad_batches": accumulate, "callbacks": [count]}
    run = trainer(HybridStrategy(PipelineParallel(2, microbatches=4), *others), max_epochs=1, **options)
    with uncollected(), count.live:
        run.fit(Tower(partial(nn.Linear, 256, 256)), DataLoader(torch.randn(48, 256), 4))
    return count.most


LIVE = {"alone": (2, None), "data": (4, DataParallel(2, bucket_mb=0.25)), "zero 2": (4, Zero(2, stage=2))}


@sampled(1, "name", LIVE)
def test_memory_of_gradients_is_released_after_a_batch(name: str) -> None:
    """Nor a circle that only the garbage collector would find: with it off, later batches take no more memory."""
    size, technique = LIVE[name]
    for accumulate in (1, 2):
        for _, second, *later in run_on_ranks(size, most_live, technique, accumulate):
            assert max(later) < second + 0.5


PACKAGE = str(Path(lightning_parallel.__file__).parent)
MOST_CALLS = 1200
COUNTED = 3  # a batch by which all that happens once has happened


class Stemmed(Tower):
    """Blocks between a map and a loss."""

    def __init__(self) -> None:
        super().__init__(partial(PlainBlock, 16, 32), 4)
        self.stem, self.head = nn.Linear(16, 16), nn.Linear(16, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.stem(batch)
        for block in self.blocks:
            x = block(x)
        loss = self.head(x).square().mean()
        self.log("train_loss", loss)
        return loss


class Calls(Callback):
    """Counts the library's functions that one step calls, from the start of its batch to that of the next."""

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
    run.fit(Stemmed(), DataLoader(torch.randn(48, 16), 8))
    return calls.of_function


def test_calls_of_the_library_on_the_last_stage_are_few() -> None:
    """Host time that counts once for each microbatch."""
    last = run_on_ranks(2, counted)[1]
    assert 0 < last.total() <= MOST_CALLS, last.most_common(30)
