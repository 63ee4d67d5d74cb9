"""CPU time of our strategies against Lightning's own, on two gloo ranks with one thread each."""

from __future__ import annotations

import os
from functools import partial

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_parallel import ContextParallelStrategy, DataParallelStrategy, HybridStrategy, ZeroStrategy
from tests.benchmarks.interleaved import (
    Variant,
    markdown,
    measure,
    ratios,
    show,
    spread,
    table_of_differences,
    table_of_ratios,
    verdict,
)
from tests.benchmarks.models import ShardedTiny, ShardedTransformer, Tiny, Transformer

pytestmark = [pytest.mark.benchmark, pytest.mark.filterwarnings("ignore")]

DDP = "Lightning DDP"
FSDP = "Lightning ModelParallel"
SINGLE = "Lightning single device"
AGAIN = "the same again"


def beside_lightning(model: type[LightningModule], sharded: type[LightningModule]) -> dict[str, Variant]:
    fsdp = partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)
    return {
        DDP: Variant(model, DDPStrategy),
        AGAIN: Variant(model, DDPStrategy),
        "DataParallel": Variant(model, DataParallelStrategy),
        **{f"Zero(stage={n})": Variant(model, partial(ZeroStrategy, stage=n)) for n in (1, 2, 3)},
        FSDP: Variant(sharded, fsdp),
    }


TRANSFORMERS = {
    **beside_lightning(Transformer, ShardedTransformer),
    "no communication": Variant(Transformer, lambda: "auto", devices=1),
}
TARGETS = {"DataParallel": "1.02", "Zero(stage=1)": "1.06", "Zero(stage=2)": "1.06", "Zero(stage=3)": "1.22"}

TINY = beside_lightning(Tiny, ShardedTiny)
ALONE = {
    SINGLE: Variant(Tiny, lambda: "auto", devices=1),
    AGAIN: Variant(Tiny, lambda: "auto", devices=1),
    "HybridStrategy()": Variant(Tiny, HybridStrategy, devices=1),
}


def test_transformer(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = measure(TRANSFORMERS, ranks=2, shape=(128, 256), batch=4, steps=10)
    said = [verdict(rounds, AGAIN, DDP), table_of_ratios(rounds, DDP, TARGETS)]
    sharded = [{name: costs[name] for name in (FSDP, "Zero(stage=3)")} for costs in rounds]
    said.append(table_of_ratios(sharded, FSDP, {"Zero(stage=3)": "1.00"}))
    show(capsys, "4 blocks of width 256, sequence 128, batch 4, fused AdamW, 2 ranks", said)


def test_cost_of_a_step_on_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = measure(TINY, ranks=2, shape=(32,), batch=4, steps=300)
    said = [verdict(rounds, AGAIN, DDP, "host"), table_of_differences(rounds, DDP, {"DataParallel": "0.1"})]
    show(capsys, "two layers of 32 x 32, SGD, 2 ranks: what a strategy adds to a step", said)


def test_cost_of_a_step_on_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = measure(ALONE, ranks=1, shape=(32,), batch=4, steps=300)
    said = [verdict(rounds, AGAIN, SINGLE, "host"), table_of_differences(rounds, SINGLE, {"HybridStrategy()": "0.1"})]
    show(capsys, "two layers of 32 x 32, SGD, 1 rank: what a strategy adds to a step", said)


SEQUENCE = int(os.environ.get("SEQUENCE", "8192"))
WHOLE, METHODS = "one process", ("ring", "ulysses", "all_gather")
LONG = partial(Transformer, width=128, blocks=2)
DIVIDED = {
    WHOLE: Variant(LONG, lambda: "auto", devices=1),
    AGAIN: Variant(LONG, lambda: "auto", devices=1),
    **{name: Variant(LONG, partial(ContextParallelStrategy, 2, method=name)) for name in METHODS},
}


def test_long_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    """What it costs two ranks, attention and all else, beside one process that reads the same tokens."""
    rounds = measure(DIVIDED, ranks=2, shape=(SEQUENCE, 128), batch=1, steps=2, rounds=5)
    both = {name: spread([2 * each for each in ratios(rounds, name, WHOLE, "cpu")]) for name in METHODS}
    rows = [["method", "both ranks / one process", "goal"], *([name, said, "1.15"] for name, said in both.items())]
    show(capsys, f"{SEQUENCE} positions, CPU time", [verdict(rounds, AGAIN, WHOLE), markdown(rows)])
