"""The group whose messages take time, told by a clock that naps and messages set: nothing is timed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_parallel import DataParallelStrategy, ZeroStrategy
from lightning_parallel.collectives import functional
from tests.benchmarks import overlap, sleeping
from tests.benchmarks.delaying import BACKEND, Pace, pretended, told_by_a_clock
from tests.benchmarks.overlap import BANDWIDTH, BUCKET_MB, fit

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
    with told_by_a_clock() as clock, pretended(RANKS, pace):
        expected = pace.alpha + share * sent.nbytes / pace.bandwidth
        pending = start_message(sent, dist.group.WORLD)
        assert clock.now == 0.0
        pending.wait()
        assert clock.now == pytest.approx(expected)
    assert pace.busy == pace.waited == pytest.approx(expected)


def test_messages_of_one_group_wait_for_each_other() -> None:
    pace = Pace(alpha=0.15, on=True)
    with told_by_a_clock() as clock, pretended(RANKS, pace):
        other = dist.new_group([0, 1], backend="delaying")
        first, second = (functional.all_reduce(torch.ones(1), dist.group.WORLD) for _ in range(2))
        functional.all_reduce(torch.ones(1), other).wait()
        assert clock.now == pytest.approx(pace.alpha, rel=1e-3)
        second.wait()
        assert clock.now == pytest.approx(2 * pace.alpha, rel=1e-3)
        first.wait()
        assert clock.now == pytest.approx(2 * pace.alpha, rel=1e-3)


def test_received_is_what_was_sent() -> None:
    with pretended(RANKS, Pace()):
        gathered = torch.empty(RANKS * 2)
        functional.all_gather(gathered, torch.tensor([1.0, 2.0]), dist.group.WORLD).wait()
        assert gathered.tolist() == [1.0, 2.0] * RANKS


STRATEGIES = {
    "data parallel": lambda: DataParallelStrategy(bucket_mb=BUCKET_MB, process_group_backend=BACKEND),
    "zero 1": lambda: ZeroStrategy(stage=1, process_group_backend=BACKEND),
    "zero 2": lambda: ZeroStrategy(stage=2, process_group_backend=BACKEND),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STRATEGIES)
def test_no_more_than_the_last_bucket_is_waited_for(name: str) -> None:
    with told_by_a_clock(overlap, sleeping):
        steps = fit(STRATEGIES[name], limit_train_batches=8)
    last_bucket = 2 * BUCKET_MB * 2**20 / BANDWIDTH
    assert min(steps.waited) <= last_bucket < 0.2 * steps.busy[-1]
