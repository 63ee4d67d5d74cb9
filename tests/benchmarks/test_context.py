"""What a long sequence costs two ranks, attention and all else, beside one process that reads the same tokens."""

from __future__ import annotations

import os
from functools import partial

import pytest

from lightning_parallel import ContextParallelStrategy
from tests.benchmarks.interleaved import Variant, measure, ratios, spread, verdict
from tests.benchmarks.models import Transformer

pytestmark = [pytest.mark.benchmark, pytest.mark.filterwarnings("ignore")]

SEQUENCE = int(os.environ.get("SEQUENCE", "8192"))
ALONE, AGAIN, METHODS = "one process", "the same again", ("ring", "ulysses", "all_gather")
Long = partial(Transformer, width=128, blocks=2)
VARIANTS = {
    ALONE: Variant(Long, lambda: "auto", devices=1),
    AGAIN: Variant(Long, lambda: "auto", devices=1),
    **{name: Variant(Long, partial(ContextParallelStrategy, 2, method=name)) for name in METHODS},
}


def test_cpu_time_of_a_long_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = measure(VARIANTS, ranks=2, shape=(SEQUENCE, 128), batch=1, steps=2, rounds=5)
    with capsys.disabled():
        print(f"\n{SEQUENCE} positions, CPU time of both ranks: {verdict(rounds, AGAIN, ALONE)}")
        for name in METHODS:
            both = [2 * each for each in ratios(rounds, name, ALONE, "cpu")]
            print(f"{name:12} {spread(both)} of one process; goal 1.15")
