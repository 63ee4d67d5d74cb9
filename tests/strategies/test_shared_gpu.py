"""Ranks that share one GPU train, go on from a checkpoint, validate and predict as one process on the host does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lightning_parallel import (
    ActivationCheckpoint,
    Compile,
    ContextParallel,
    ContextParallelStrategy,
    DataParallel,
    DataParallelStrategy,
    ExpertParallel,
    ExpertParallelStrategy,
    HybridStrategy,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from tests.gpu import on_gpu
from tests.strategies.journeys import check_journey
from tests.techniques.tensor_layouts import hybrid

PP2 = PipelineParallel(2, microbatches=2)
# ranks, strategy, ranks that read different samples
LAYOUTS: dict[str, tuple[int, Callable[..., Any], int]] = {
    "none": (1, HybridStrategy, 1),
    "dp2": (2, DataParallelStrategy, 2),
    "dp4": (4, DataParallelStrategy, 4),
    "pp2 x tp2": (4, hybrid(PP2, TensorParallel(2)), 1),
    "zero1": (2, partial(ZeroStrategy, stage=1), 2),
    "zero1 offloaded": (2, partial(ZeroStrategy, stage=1, offload=True), 2),
    "zero2": (2, partial(ZeroStrategy, stage=2), 2),
    "zero2 offloaded": (2, partial(ZeroStrategy, stage=2, offload=True), 2),
    "zero3": (2, partial(ZeroStrategy, stage=3), 2),
    "zero3 offloaded": (2, partial(ZeroStrategy, stage=3, offload=True), 2),
    "hsdp 2x2": (4, partial(ZeroStrategy, 2, replicate=2), 4),
    "tp2": (2, partial(TensorParallelStrategy, 2), 1),
    "tp2, overlapping": (2, hybrid(TensorParallel(2, overlap=True)), 1),
    "tp4": (4, partial(TensorParallelStrategy, 4), 1),
    "pp2": (2, partial(PipelineParallelStrategy, 2), 1),
    "pp4": (4, partial(PipelineParallelStrategy, 4), 1),
    "pp2 zbv": (2, partial(PipelineParallelStrategy, 2, schedule="zbv", microbatches=4), 1),
    "cp2": (2, partial(ContextParallelStrategy, 2), 1),
    "cp4 ring": (4, partial(ContextParallelStrategy, 4, method="ring"), 1),
    "cp2 ulysses": (2, partial(ContextParallelStrategy, 2, method="ulysses"), 1),
    "ep2": (2, partial(ExpertParallelStrategy, 2), 2),
    "tp2 x zero3": (4, hybrid(TensorParallel(2), Zero(2)), 2),
    "pp2 x zero1": (4, hybrid(PP2, Zero(2, stage=1)), 2),
    "cp2 x zero3": (4, hybrid(ContextParallel(2), Zero(2)), 2),
    "ep2 x pp2": (4, hybrid(DataParallel(2), PP2, ExpertParallel(2)), 2),
    "zero3, recomputed and compiled": (2, hybrid(Zero(2), ActivationCheckpoint(), Compile()), 2),
}
COLUMNS = {"ep2": "moe", "ep2 x pp2": "moe"}


@on_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_share_a_gpu_train_as_one_process_on_the_host_does(layout: str) -> None:
    check_journey(*LAYOUTS[layout], "gpu", rtol=1e-8, column=COLUMNS.get(layout, "gpt"))
