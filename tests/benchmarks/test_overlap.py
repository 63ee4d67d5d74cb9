"""What strategies hide behind computing: steps of layers that sleep, on 8 ranks of which 7 are made up."""

from __future__ import annotations

import os
import statistics

import pytest
from lightning.pytorch.strategies import DDPStrategy

from lightning_parallel import DataParallelStrategy, ZeroStrategy
from tests.benchmarks.delaying import BACKEND
from tests.benchmarks.interleaved import markdown, spread
from tests.benchmarks.overlap import BUCKET_MB, LAYERS, NAP, RANKS, fit
from tests.benchmarks.test_strategies import show

pytestmark = [pytest.mark.benchmark, pytest.mark.filterwarnings("ignore")]

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


def test_hidden_messages(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [{}, {}, {}]
    for number, measured in enumerate(rounds):
        for name in list(VARIANTS)[:: -1 if number % 2 else 1]:
            measured[name] = fit(VARIANTS[name], 1 if name == ALONE else RANKS)
    rows = [
        [
            "variant",
            "ms a step",
            "lowest",
            "ms over one device",
            "ms over DDP",
            "ms of messages",
            "messages",
            "ms waited for them",
        ]
    ]
    for name in VARIANTS:
        steps = [1000 * measured[name].median for measured in rounds]
        over = [
            [1000 * (measured[name].median - measured[base].median) for measured in rounds] for base in (ALONE, DDP)
        ]
        last = rounds[-1][name]
        sent = f"{1000 * last.busy[-1]:.0f}", f"{last.messages[-1]}", f"{1000 * statistics.median(last.waited):.0f}"
        lowest = 1000 * min(min(measured[name].seconds) for measured in rounds)
        rows.append([name, f"{sorted(steps)[1]:.0f}", f"{lowest:.0f}", *map(spread, over), *sent])
    computing = 1000 * LAYERS * 3 * NAP
    said = f"load {os.getloadavg()[0]:.1f}; layers sleep {computing:.0f} ms"
    show(capsys, f"{LAYERS} layers that sleep, {RANKS} ranks", [said, markdown(rows)])
