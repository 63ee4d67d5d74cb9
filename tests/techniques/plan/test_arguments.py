"""Wrong arguments are errors where they are written: with the value, the rule and what else to pass."""

import re
from datetime import timedelta
from functools import partial

import pytest

from lightning_parallel import (
    ActivationCheckpoint,
    Compile,
    DataParallel,
    HybridStrategy,
    LayerParallelStrategy,
    ParallelPlan,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallel,
    Zero,
    ZeroStrategy,
)
from lightning_parallel.mesh import resolve_sizes
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import make_schedule

WRONG = [
    (partial(Zero, stage=True), "Zero(stage=True): stage is one of 1, 2, 3"),
    (partial(Zero, offload="no"), "Zero(offload='no'): offload is True or False"),
    (partial(DataParallel, bucket_mb="25"), "bucket_mb='25'): bucket_mb is a number greater than 0"),
    (partial(DataParallel, bucket_mb=float("nan")), "bucket_mb=nan): bucket_mb is a number greater than 0"),
    (partial(TensorParallel, sequence_parallel="off"), "sequence_parallel='off'): sequence_parallel is True or False"),
    (partial(TensorParallel, sequence_parallel=False, overlap=True), "overlap=True): overlap needs a divided sequence"),
    (partial(PipelineParallel, schedule="1F1B"), "'1F1B' is no schedule; did you mean '1f1b'?"),
    (partial(PipelineParallel, schedule=None), "None is no schedule; take one of"),
    (partial(PipelineParallel, schedule="none.csv"), "there is no file none.csv"),
    (
        partial(PipelineParallel, microbatches=2.5),
        "microbatches=2.5): microbatches is a positive whole number or 'auto'",
    ),
    (partial(PipelineParallel, microbatches=0), "microbatches=0): microbatches is a positive whole number or 'auto'"),
    (partial(PipelineParallel, stages_per_rank=2), "1f1b runs 1 stage per rank, not 2"),
    (partial(PipelineParallelStrategy, schedule="zbv", stages_per_rank="2"), "is a positive whole number or None"),
    (partial(LayerParallelStrategy, split="13"), "split='13'): split is a positive whole number of blocks for each"),
    (partial(PipelineParallel, split=(0, 4)), "split=(0, 4)): split is a positive whole number of blocks for each"),
    (partial(Compile, "aot_eager", mode="default"), "only inductor has modes; omit mode"),
    (partial(Compile, "aot_eager", dynamic="maybe"), "dynamic='maybe'): dynamic is one of None, True, False"),
    (partial(ParallelPlan, blocks=""), "blocks=''): blocks are names of modules"),
    (partial(ParallelPlan, blocks=3), "blocks=3): blocks are names of modules"),
    (partial(ParallelPlan, styles="colwise"), "styles='colwise'): styles maps patterns to names of styles"),
    (partial(ParallelPlan, sequence_dim=-1), "sequence_dim=-1): sequence_dim is a dimension"),
    (partial(ZeroStrategy, plan="net.*"), "plan= gives 'net.*', which is not a plan; give ParallelPlan(blocks="),
    (partial(ZeroStrategy, timeout=30), "timeout=30 is not a time; pass datetime.timedelta"),
    (partial(ZeroStrategy, process_group_backend="glo"), "process_group_backend='glo' is none of"),
    (
        partial(HybridStrategy, ActivationCheckpoint(), ActivationCheckpoint("selective")),
        "would both act on every block",
    ),
    (partial(HybridStrategy, "zero3"), "'zero3' is not a technique; pass objects such as Zero(4)"),
    (partial(HybridStrategy, Zero(2), techniques=[Zero(2)]), "are both given; pass all of them in the list"),
    (partial(HybridStrategy, techniques=Zero(2)), "is not a list; write techniques=[Zero(size=2, stage=3"),
]


@pytest.mark.parametrize(("make", "text"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_argument_is_told_with_the_rule(make, text):
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        make()


def test_what_looks_odd_but_is_right_is_taken():
    HybridStrategy(Zero(1, replicate="auto"), plan=ParallelPlan(blocks=["a.*"], sequence_dim=0))
    ZeroStrategy(process_group_backend="cpu:gloo,cuda:nccl", timeout=timedelta(seconds=30))
    PipelineParallel(2, split=[1, 3], microbatches=3, stages_per_rank=1)


@pytest.mark.parametrize(("schedule", "halves"), [("1f1b", False), ("zbv", True)])
def test_schedule_from_a_file_refuses_what_it_cannot_do(tmp_path, schedule, halves):
    file = tmp_path / "own.CSV"
    file.write_text(make_schedule(schedule, 2, 4).csv())
    techniques = PipelineParallel(2, schedule=str(file)), ActivationCheckpoint()
    if halves:
        with pytest.raises(ValueError, match="would be computed twice"):
            HybridStrategy(*techniques)
    else:
        HybridStrategy(*techniques)


@pytest.mark.parametrize(
    ("techniques", "world_size", "text"),
    [
        ([PipelineParallel(2), TensorParallel(2)], 8, "or leave it 'auto', or add DataParallel() for 2 replicas"),
        ([PipelineParallel(2), TensorParallel(2)], 6, "pp=2 x tp=2 needs 4 ranks, but the world has 6"),
        ([PipelineParallel(2), Zero(2)], 8, "change one size, or leave it 'auto'"),
    ],
)
def test_sizes_that_leave_ranks_over_are_told_what_takes_them(techniques, world_size, text):
    with pytest.raises(ValueError, match=re.escape(text)) as told:
        resolve_sizes([technique.claim for technique in techniques], world_size)
    assert ("DataParallel" in str(told.value)) == ("replicas" in text)
