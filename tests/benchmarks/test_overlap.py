"""What strategies hide behind computing: steps of layers that sleep, on 8 ranks of which 7 are made up."""

from __future__ import annotations

import os
import statistics

import pytest
from lightning.pytorch.strategies import DDPStrategy

from lightning_parallel import DataParallel, DataParallelStrategy, HybridStrategy, PipelineParallel, Zero, ZeroStrategy
from tests.benchmarks.delaying import BACKEND
from tests.benchmarks.interleaved import markdown, spread
from tests.benchmarks.overlap import BANDWIDTH, BUCKET_MB, LAYERS, NAP, RANKS, Late, Sleeper, fit
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
MICROBATCHES = 4
BESIDE = {"DataParallel(4)": DataParallel(4, bucket_mb=BUCKET_MB), "Zero(4, stage=2)": Zero(4, stage=2)}


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


@pytest.mark.parametrize("name", BESIDE)
def test_reduction_of_a_pipelines_first_stage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The stage whose last backward nothing follows: no more than the last bucket's reduction may be waited for."""

    def make() -> HybridStrategy:
        pipeline = PipelineParallel(2, microbatches=MICROBATCHES, split=(LAYERS // 2, LAYERS // 2))
        return HybridStrategy(pipeline, BESIDE[name], **GROUP)

    rounds = [
        {kind: fit(make, RANKS, kind, MICROBATCHES) for kind in kinds} for kinds in ((Sleeper, Late), (Late, Sleeper))
    ]
    rows = [["reduced", "ms a step", "ms of messages", "messages", "ms waited for them"]]
    for kind, said in ((Sleeper, "as gradients are final"), (Late, "in backward")):
        steps, waited = (
            [1000 * statistics.median(getattr(m[kind], of)) for m in rounds] for of in ("seconds", "waited")
        )
        last = rounds[-1][kind]
        sent = f"{1000 * last.busy[-1]:.0f}", f"{last.messages[-1]}"
        rows.append([said, spread(steps), *sent, spread(waited)])
    bucket = 1000 * 2 * 3 / 4 * BUCKET_MB * 2**20 / BANDWIDTH
    computing = 1000 * LAYERS // 2 * 3 * NAP * MICROBATCHES
    said = f"load {os.getloadavg()[0]:.1f}; layers sleep {computing:.0f} ms, a bucket takes {bucket:.0f}"
    show(capsys, f"stage 0 of PipelineParallel(2) x {name}, {MICROBATCHES} microbatches", [said, markdown(rows)])
