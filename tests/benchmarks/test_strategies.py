"""CPU time of our strategies against Lightning's own, on two gloo ranks with one thread each."""

from __future__ import annotations

import pytest
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_parallel import DataParallelStrategy, HybridStrategy, ZeroStrategy
from tests.benchmarks.interleaved import Variant, measure, table_of_differences, table_of_ratios, verdict
from tests.benchmarks.models import ShardedTiny, ShardedTransformer, Tiny, Transformer

pytestmark = [pytest.mark.benchmark, pytest.mark.filterwarnings("ignore")]

DDP = "Lightning DDP"
FSDP = "Lightning ModelParallel"
SINGLE = "Lightning single device"
AGAIN = "the same again"


def lightning_fsdp() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


def zero(stage: int) -> Variant:
    return Variant(Transformer, lambda: ZeroStrategy(stage=stage))


TRANSFORMERS = {
    DDP: Variant(Transformer, DDPStrategy),
    AGAIN: Variant(Transformer, DDPStrategy),
    "no communication": Variant(Transformer, lambda: "auto", devices=1),
    "DataParallel": Variant(Transformer, DataParallelStrategy),
    "Zero(stage=1)": zero(1),
    "Zero(stage=2)": zero(2),
    "Zero(stage=3)": zero(3),
    FSDP: Variant(ShardedTransformer, lightning_fsdp),
}
TARGETS = {"DataParallel": "1.02", "Zero(stage=1)": "1.06", "Zero(stage=2)": "1.06", "Zero(stage=3)": "1.22"}

TINY = {
    DDP: Variant(Tiny, DDPStrategy),
    AGAIN: Variant(Tiny, DDPStrategy),
    "DataParallel": Variant(Tiny, DataParallelStrategy),
    "Zero(stage=1)": Variant(Tiny, lambda: ZeroStrategy(stage=1)),
    "Zero(stage=2)": Variant(Tiny, lambda: ZeroStrategy(stage=2)),
    "Zero(stage=3)": Variant(Tiny, lambda: ZeroStrategy(stage=3)),
    FSDP: Variant(ShardedTiny, lightning_fsdp),
}

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


def show(capsys: pytest.CaptureFixture[str], title: str, parts: list[str]) -> None:
    with capsys.disabled():
        print("\n\n" + "\n\n".join([title, *parts]) + "\n")
