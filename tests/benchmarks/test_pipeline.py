"""How close the steps of a pipeline come to the time that their schedule allows, with stages that sleep."""

from __future__ import annotations

import os
import statistics

import pytest

from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import SCHEDULES
from tests.benchmarks.interleaved import ROUNDS, markdown
from tests.benchmarks.sleeping import Pipeline, measure
from tests.benchmarks.test_strategies import show

pytestmark = [pytest.mark.benchmark, pytest.mark.filterwarnings("ignore")]

GOALS = {"gpipe": "1.10", "1f1b": "1.10", "interleaved_1f1b": "1.10", "looped_bfs": "1.10"}
SECONDS = float(os.environ.get("SECONDS_ASLEEP", "0.06"))


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (8, 16)])
def test_sleeping_stages(capsys: pytest.CaptureFixture[str], ranks: int, microbatches: int) -> None:
    pipelines = [Pipeline(name, ranks, microbatches, SECONDS) for name in SCHEDULES]
    before = os.getloadavg()[0]
    times = measure(pipelines, steps=2, rounds=max(1, ROUNDS // 4))
    rows = [["schedule", "bound, ms", "step, ms", "step / bound", "lowest", "goal", "step / that of 1f1b", "bound"]]
    base = [pipeline.name for pipeline in pipelines].index("1f1b")
    for pipeline, seconds in zip(pipelines, times, strict=True):
        step, bound = statistics.median(seconds), pipeline.bound
        numbers = f"{1000 * bound:.0f}", f"{1000 * step:.0f}", f"{step / bound:.3f}", f"{min(seconds) / bound:.3f}"
        against = f"{step / statistics.median(times[base]):.3f}", f"{bound / pipelines[base].bound:.3f}"
        rows.append([pipeline.name, *numbers, GOALS.get(pipeline.name, "1.20"), *against])
    said = f"{len(times[0])} steps each, load {before:.0f} to {os.getloadavg()[0]:.0f}"
    title = f"F = I = W = {1000 * SECONDS:.0f} ms asleep, {ranks} ranks, {microbatches} microbatches"
    show(capsys, title, [said, markdown(rows)])
