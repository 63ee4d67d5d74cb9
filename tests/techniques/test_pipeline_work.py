"""What a pipeline's ranks do and hold, counted: activations alive, FLOPs, reductions, bytes of parameters."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.flop_counter import flop_registry

from lightning_parallel import DataParallel, HybridStrategy, PipelineParallel, PipelineParallelStrategy, Zero
from lightning_parallel.techniques.pipeline_parallel.gradients import ApplyPrecomputedGrads
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import SCHEDULES, make_schedule
from lightning_parallel.techniques.pipeline_parallel.schedule.simulate import simulate
from lightning_parallel.techniques.tools.absent import Absent
from lightning_parallel.techniques.tools.leaves import leaf_of
from tests.live import LiveBytes, stepped, uncollected
from tests.models import PlainBlock
from tests.ranks import ranks, run_on_ranks
from tests.techniques.test_wire import group_size
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
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Held.apply(x))


class Tower(LightningModule):
    """Nothing but blocks, all alike."""

    def __init__(self, block: Callable[[], nn.Module], late: bool = False) -> None:
        super().__init__()
        self.block = block
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if "blocks" not in self._modules:
            self.blocks = nn.ModuleList(self.block() for _ in range(BLOCKS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def data(microbatches: int) -> DataLoader:
    inputs = torch.randn(3 * microbatches, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(inputs, microbatches)


# ---------------------------------------------------------------- live activations


class Requiring(Counted):
    """The first one's input requires gradients too, so that all blocks count."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.requires_grad or not torch.is_grad_enabled() else x.requires_grad_())


def most_alive(schedule: str, ranks: int, microbatches: int) -> int:
    gc.collect()
    Held.alive.clear()
    Held.most = 0
    strategy = PipelineParallelStrategy(ranks, schedule=schedule, microbatches=microbatches)
    trainer(strategy, max_epochs=1).fit(Tower(partial(Requiring, 16, 32)), data(microbatches))
    return Held.most


@sampled(1, "schedule", SCHEDULES)
def test_as_many_microbatches_live_as_the_schedule_promises(schedule: str) -> None:
    ranks, microbatches = 4, 8
    promised = simulate(make_schedule(schedule, ranks, microbatches)).peak_activations
    blocks_of_a_rank = BLOCKS / ranks
    found = run_on_ranks(ranks, most_alive, schedule, ranks, microbatches)
    assert found == [round(peak * blocks_of_a_rank) for peak in promised]


# ---------------------------------------------------------------- work and messages


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


def worked(strategy: Any, microbatches: int, samples: int = 8) -> tuple[int, dict[tuple[str, int], int]]:
    watch = Watch()
    trainer(strategy(), max_epochs=1, callbacks=[watch]).fit(Tower(partial(PlainBlock, 16, 32)), data(samples))
    return watch.work.flops, dict(watch.work.messages)


def single() -> str:
    return "auto"


@sampled(1, "schedule", ["1f1b", "interleaved_zero_bubble", "zbv"])
def test_halves_of_a_backward_are_as_much_work_as_a_whole_one(schedule: str) -> None:
    [(expected, _)] = run_on_ranks(1, worked, single, 1)
    found = run_on_ranks(2, worked, partial(PipelineParallelStrategy, 2, schedule=schedule, microbatches=4), 4)
    assert sum(flops for flops, _ in found) == expected


def beside(technique: Any, microbatches: int) -> HybridStrategy:
    return HybridStrategy(PipelineParallel(2, microbatches=microbatches), technique)


@pytest.mark.exhaustive
@sampled(1, "technique", [DataParallel(3), Zero(3, stage=2), Zero(3, stage=3)], ids=["dp", "2", "3"])
def test_messages_of_other_techniques_are_one_for_a_batch(technique: Any) -> None:
    few, many = (run_on_ranks(6, worked, partial(beside, technique, m), m) for m in (1, 4))
    for (_, one), (_, four) in zip(few, many, strict=True):
        among_three = {key: count for key, count in one.items() if key[1] == 3}
        assert among_three
        assert {key: count for key, count in four.items() if key[1] == 3} == among_three


# ---------------------------------------------------------------- memory


def built(ranks: int) -> tuple[int, int]:
    """The most bytes that were real at a time while the model was made, and those that this rank keeps."""

    found: list[tuple[int, int]] = []

    class Peeked(Tower):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            held = sum(p.nbytes for p in self.parameters() if not isinstance(p, Absent))
            if held:  # else the step is analyzed
                found.append((live.peak, held))
            return super().training_step(batch, batch_idx)

    model, live = Peeked(partial(nn.Linear, 256, 256), late=True), LiveBytes()
    loader = DataLoader(torch.randn(4, 256), 2)
    with live:
        trainer(PipelineParallelStrategy(ranks), max_steps=1).fit(model, loader)
    return found[0]


def test_only_a_stages_own_parameters_are_ever_allocated() -> None:
    whole = BLOCKS * (256 * 256 + 256) * 4
    for peak, held in run_on_ranks(4, built, 4):
        assert held == whole / 4
        assert peak < 1.75 * held  # its own, and the one that is being made


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


@ranks(2)
def test_divided_parameter_that_no_step_used_gets_no_gradient() -> None:
    mesh = init_device_mesh("cpu", (2,))
    unused, used = (nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])) for _ in range(2))
    leaves = [leaf_of(unused), leaf_of(used)]
    always = torch.zeros((), requires_grad=True)
    ApplyPrecomputedGrads.apply(torch.ones(()), [None, torch.full((2,), 3.0)], 1.0, always, *leaves).backward()
    assert unused.grad is None
    assert used.grad.full_tensor().tolist() == [3.0] * 4
