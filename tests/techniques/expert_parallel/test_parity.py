"""Expert parallel trains as one process does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lightning_parallel import (
    ActivationCheckpoint,
    Compile,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    ExpertParallelStrategy,
    PipelineParallel,
    TensorParallel,
    Zero,
)
from tests.layouts import hybrid
from tests.techniques.parity import check

PP2, EP2, TP2 = PipelineParallel(2, microbatches=2), ExpertParallel(2), TensorParallel(2)
WHOLE = PipelineParallel(2, microbatches=2, loss_over="batch")  # for a loss that is no mean over samples
TWO, FOUR = partial(ExpertParallelStrategy, 2), partial(ExpertParallelStrategy, 4)
COPIES = hybrid(Zero(4), EP2)
OFFLOADED = hybrid(Zero(2, offload=True), EP2)
OVER_CONTEXT = hybrid(DataParallel(2), ContextParallel(2), EP2)
ROWS: dict[str, tuple[str, int, Any, int, dict[str, Any]]] = {
    "mixtral, zero 3, two copies": ("mixtral", 4, COPIES, 4, {}),
    "balanced, over the batch of a pipeline": ("moe aux", 4, hybrid(DataParallel(2), WHOLE, EP2), 2, {}),
    "penalties, zero 3, offloaded": ("penalized_banks", 2, OFFLOADED, 2, {}),
    "ranks without tokens": (
        *("banked_experts", 4, FOUR, 4, {"data": {"samples": 9, "length": 2}, "accumulate_grad_batches": 1}),
    ),
    "moe, tensor": ("moe", 4, hybrid(DataParallel(2), TP2, EP2), 2, {}),
    "qwen3": ("qwen3_moe", 2, TWO, 2, {}),
    "olmoe of four": ("olmoe", 4, FOUR, 4, {}),
    "deepseek, zero 1": ("deepseek", 2, hybrid(Zero(2, stage=1), EP2), 2, {}),
    "gpt_oss": ("gpt_oss", 2, TWO, 2, {}),
    "flat experts in four": ("flat_experts", 4, hybrid(DataParallel(4), EP2), 4, {}),
    "banks, zero 2, two copies": ("banked_experts", 4, hybrid(Zero(4, stage=2), EP2), 4, {}),
    "routed mixtral, zero 3": ("routed_mixtral", 2, hybrid(Zero(2), EP2), 2, {}),
    "moe, hsdp": ("moe", 4, hybrid(Zero(2, replicate=2), EP2), 4, {}),
    "moe aux, hsdp of four": ("moe aux", 4, hybrid(Zero(2, replicate=2), ExpertParallel(4)), 4, {}),
    "moe bias, hsdp 1": ("moe bias", 4, hybrid(Zero(2, stage=1, replicate=2), EP2), 4, {}),
    "mixtral, tensor, sequence whole": (
        *("mixtral", 4, hybrid(DataParallel(2), TensorParallel(2, sequence_parallel=False), EP2), 2, {}),
    ),
    "gpt_oss, tensor": ("gpt_oss", 4, hybrid(DataParallel(2), TP2, EP2), 2, {}),
    "moe bias, pipeline": ("moe bias", 4, hybrid(DataParallel(2), WHOLE, EP2), 2, {}),
    "qwen3, pipeline x zero 3": ("qwen3_moe", 4, hybrid(Zero(2), PP2, EP2), 2, {}),
    "routed mixtral, over the batch": ("routed_mixtral", 4, hybrid(Zero(2), WHOLE, EP2), 2, {}),
    "moe aux, context": ("moe aux", 4, OVER_CONTEXT, 2, {}),
    "moe, over context": ("moe", 2, hybrid(Zero(1), ContextParallel(2), EP2), 1, {}),
    "mixtral of four over context": ("mixtral", 4, hybrid(Zero(2), ContextParallel(2), ExpertParallel(4)), 2, {}),
    "moe, tensor x pipeline": ("moe", 8, hybrid(DataParallel(2), WHOLE, TP2, EP2), 2, {}),
    "olmoe, recomputed": ("olmoe", 2, hybrid(Zero(2), ActivationCheckpoint(), EP2), 2, {}),
    "moe, compiled": ("moe", 2, hybrid(DataParallel(2), Compile(backend="aot_eager"), EP2), 2, {}),
    "tied banks, context": ("tied_banks", 4, OVER_CONTEXT, 2, {}),
    "tied banks, zero 3": ("tied_banks", 2, hybrid(Zero(2), EP2), 2, {}),
    "penalties": ("penalized_banks", 2, TWO, 2, {}),
    "uneven, pipeline": ("mixtral", 4, hybrid(DataParallel(2), PP2, EP2), 2, {"data": {"samples": 37}}),
    "uneven, balanced": ("moe aux", 4, hybrid(DataParallel(2), WHOLE, EP2), 2, {"data": {"samples": 33}}),
}
DEFAULT = ("mixtral, zero 3, two copies", "moe, tensor", "penalties, zero 3, offloaded")


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row in DEFAULT else (pytest.mark.exhaustive,)) for row in ROWS]
)
def test_expert_parallel_trains_as_one_process(row: str) -> None:
    column, n, strategy, readers, options = ROWS[row]
    exact = column.endswith(("_experts", "_banks")) or column.startswith("moe")
    model = {} if exact else {"num_hidden_layers": 2, "experts_implementation": "eager"}
    rtol = 1e-9 if exact and "uneven" not in row else 1e-6  # the losses of a library are computed in single precision
    check(column, n, strategy, readers, precision="64-true", rtol=rtol, model=model, **options)
