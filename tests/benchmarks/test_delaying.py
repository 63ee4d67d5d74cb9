"""The group whose messages take time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lightning_parallel import DataParallel, DataParallelStrategy, HybridStrategy, PipelineParallel, Zero, ZeroStrategy
from lightning_parallel.collectives import functional
from lightning_parallel.techniques.technique import Technique
from tests.benchmarks.delaying import BACKEND, Pace, pretended
from tests.benchmarks.overlap import BANDWIDTH, BUCKET_MB, fit
from tests.tiers import sampled

RANKS = 4
COLLECTIVES = {
    "all_reduce": (lambda t, g: functional.all_reduce(t.clone(), g), 2 * 3 / 4),
    "all_gather": (lambda t, g: functional.all_gather(torch.empty(RANKS * t.numel()), t, g), 3),
    "reduce_scatter": (lambda t, g: functional.reduce_scatter(torch.empty(t.numel() // RANKS), t, g), 3 / 4),
    "all_to_all": (lambda t, g: dist.all_to_all_single(torch.empty_like(t), t, group=g, async_op=True), 3 / 4),
    "broadcast": (lambda t, g: dist.broadcast(t, 0, group=g, async_op=True), 1),
    "send": (lambda t, g: functional.exchange({1: t}, {}, g), 1),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_messages_take_their_time(name: str) -> None:
    start_message, share = COLLECTIVES[name]
    pace = Pace(alpha=0.01, bandwidth=1e6, on=True)
    sent = torch.ones(10_000)
    with pretended(RANKS, pace):
        expected = pace.alpha + share * sent.nbytes / pace.bandwidth
        start = time.perf_counter()
        pending = start_message(sent, dist.group.WORLD)
        started = time.perf_counter() - start
        pending.wait()
        assert started < expected <= time.perf_counter() - start
    assert pace.busy == pytest.approx(expected)


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def test_messages_of_a_group_wait_for_each_other_and_not_for_those_of_another() -> None:
    pace = Pace(alpha=0.15, on=True)
    with pretended(RANKS, pace):
        other = dist.new_group([0, 1], backend="delaying")
        first, second = (functional.all_reduce(torch.ones(1), dist.group.WORLD) for _ in range(2))
        assert seconds(functional.all_reduce(torch.ones(1), other).wait) < 2 * pace.alpha
        assert seconds(second.wait) > 0.5 * pace.alpha
        first.wait()


def test_received_is_what_was_sent() -> None:
    with pretended(RANKS, Pace()):
        gathered = torch.empty(RANKS * 2)
        functional.all_gather(gathered, torch.tensor([1.0, 2.0]), dist.group.WORLD).wait()
        assert gathered.tolist() == [1.0, 2.0] * RANKS


def piped(technique: Technique) -> HybridStrategy:
    pipeline = PipelineParallel(2, microbatches=2, split=(6, 6))
    return HybridStrategy(pipeline, technique, process_group_backend=BACKEND)


STRATEGIES = {
    "data parallel": lambda: DataParallelStrategy(bucket_mb=BUCKET_MB, process_group_backend=BACKEND),
    "zero 1": lambda: ZeroStrategy(stage=1, process_group_backend=BACKEND),
    "zero 2": lambda: ZeroStrategy(stage=2, process_group_backend=BACKEND),
    "pipeline x data parallel": lambda: piped(DataParallel(4, bucket_mb=BUCKET_MB)),
    "pipeline x zero 2": lambda: piped(Zero(4, stage=2)),
}


@pytest.mark.filterwarnings("ignore")
@sampled(1, "name", STRATEGIES)
def test_no_more_than_the_last_bucket_is_waited_for(name: str) -> None:
    steps = fit(STRATEGIES[name], limit_train_batches=8)
    last_bucket = 2 * BUCKET_MB * 2**20 / BANDWIDTH
    share = 0.4 if name.startswith("pipeline") else 0.2  # a stage has half of the layers
    assert min(steps.waited) <= last_bucket < share * steps.busy[-1]
