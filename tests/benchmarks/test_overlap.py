"""What strategies hide behind computing: steps of layers that sleep, on 8 ranks of which 7 are made up."""

from __future__ import annotations

import os
import statistics

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_parallel import DataParallelStrategy, ZeroStrategy
from lightning_parallel.collectives import functional
from tests.benchmarks import overlap
from tests.benchmarks.delaying import BACKEND, Pace, pretended, told_by_a_clock
from tests.benchmarks.interleaved import markdown, show, spread
from tests.benchmarks.overlap import BANDWIDTH, BUCKET_MB, LAYERS, NAP, RANKS, fit

pytestmark = pytest.mark.filterwarnings("ignore")

GROUP = {"process_group_backend": BACKEND}
ALONE = "one device"
DDP = "Lightning DDP"
VARIANTS = {
    ALONE: lambda: "auto",
    DDP: lambda: DDPStrategy(bucket_cap_mb=BUCKET_MB, **GROUP),
    "DDP again": lambda: DDPStrategy(bucket_cap_mb=BUCKET_MB, **GROUP),
    "DataParallel": lambda: DataParallelStrategy(bucket_mb=BUCKET_MB, **GROUP),
    "Zero(stage=1)": lambda: ZeroStrategy(stage=1, **GROUP),
    "Zero(stage=2)": lambda: ZeroStrategy(stage=2, **GROUP),
    "Zero(stage=3)": lambda: ZeroStrategy(stage=3, **GROUP),
}


@pytest.mark.benchmark
def test_hidden_messages(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [{}, {}, {}]
    for number, measured in enumerate(rounds):
        for name in list(VARIANTS)[:: -1 if number % 2 else 1]:
            measured[name] = fit(VARIANTS[name], 1 if name == ALONE else RANKS)
    titles = "variant", "ms a step", "lowest", "ms over one device", "ms over DDP", "ms of messages", "messages"
    rows = [[*titles, "ms waited for them"]]
    for name in VARIANTS:
        steps = [1000 * measured[name].median for measured in rounds]
        over = [
            [1000 * (measured[name].median - measured[base].median) for measured in rounds] for base in (ALONE, DDP)
        ]
        last = rounds[-1][name]
        sent = f"{1000 * last.busy[-1]:.0f}", f"{last.messages[-1]}", f"{1000 * statistics.median(last.waited):.0f}"
        lowest = 1000 * min(min(measured[name].seconds) for measured in rounds)
        rows.append([name, f"{sorted(steps)[1]:.0f}", f"{lowest:.0f}", *map(spread, over), *sent])
    said = f"load {os.getloadavg()[0]:.1f}; layers sleep {1000 * LAYERS * 3 * NAP:.0f} ms"
    show(capsys, f"{LAYERS} layers that sleep, {RANKS} ranks", [said, markdown(rows)])


# ---------------------------------------------------------------- told by a clock that naps and messages set


COLLECTIVES = {
    "all_reduce": (lambda t, g: functional.all_reduce(t.clone(), g), 2 * 3 / 4),
    "all_gather": (lambda t, g: functional.all_gather(torch.empty(4 * t.numel()), t, g), 3),
    "reduce_scatter": (lambda t, g: functional.reduce_scatter(torch.empty(t.numel() // 4), t, g), 3 / 4),
    "send": (lambda t, g: functional.exchange({1: t}, {}, g), 1),
}


def test_messages_take_their_time_one_after_the_other() -> None:
    pace, sent = Pace(alpha=0.01, bandwidth=1e6, on=True), torch.ones(10_000)
    with told_by_a_clock() as clock, pretended(4, pace):
        expected = 0.0
        for start_message, share in COLLECTIVES.values():
            pending = start_message(sent, dist.group.WORLD)
            assert clock.now == pytest.approx(expected)
            pending.wait()
            expected += pace.alpha + share * sent.nbytes / pace.bandwidth
            assert clock.now == pytest.approx(expected)
        assert pace.busy == pace.waited == pytest.approx(expected)
        first, second = (functional.all_reduce(torch.ones(1), dist.group.WORLD) for _ in range(2))
        second.wait()
        assert clock.now == pytest.approx(expected + 2 * pace.alpha, rel=1e-3)
        first.wait()
        assert clock.now == pytest.approx(expected + 2 * pace.alpha, rel=1e-3)


@pytest.mark.parametrize("name", ["DataParallel", "Zero(stage=2)"])
def test_no_more_than_the_last_bucket_is_waited_for(name: str) -> None:
    with told_by_a_clock(overlap):
        steps = fit(VARIANTS[name], batches=8)
    last_bucket = 2 * BUCKET_MB * 2**20 / BANDWIDTH
    assert min(steps.waited) <= last_bucket < 0.2 * steps.busy[-1]
