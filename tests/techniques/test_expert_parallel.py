"""Expert parallel trains as one process does."""

from __future__ import annotations

from functools import partial
from typing import Any

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
from tests.techniques.tensor_layouts import check, hybrid
from tests.tiers import covering, sampled

PP2 = PipelineParallel(2, microbatches=2)
EP2 = ExpertParallel(2)
LAYOUTS = {
    "ep2": (2, partial(ExpertParallelStrategy, 2), 2),
    "ep4": (4, partial(ExpertParallelStrategy, 4), 4),
    "ep2 in dp4": (4, hybrid(DataParallel(4), EP2), 4),
    "zero1": (2, hybrid(Zero(2, stage=1), EP2), 2),
    "zero2, two copies": (4, hybrid(Zero(4, stage=2), EP2), 4),
    "zero3": (2, hybrid(Zero(2), EP2), 2),
    "zero3, offloaded": (2, hybrid(Zero(2, offload=True), EP2), 2),
    "zero3, two copies": (4, hybrid(Zero(4), EP2), 4),
    "hsdp": (4, hybrid(Zero(2, replicate=2), EP2), 4),
    "hsdp, ep4": (4, hybrid(Zero(2, replicate=2), ExpertParallel(4)), 4),
    "hsdp1": (4, hybrid(Zero(2, stage=1, replicate=2), EP2), 4),
    "tp2": (4, hybrid(DataParallel(2), TensorParallel(2), EP2), 2),
    "tp2, whole sequence": (4, hybrid(DataParallel(2), TensorParallel(2, sequence_parallel=False), EP2), 2),
    "pp2": (4, hybrid(DataParallel(2), PP2, EP2), 2),
    "pp2 x zero3": (4, hybrid(Zero(2), PP2, EP2), 2),
    "cp2": (4, hybrid(DataParallel(2), ContextParallel(2), EP2), 2),
    "over cp2": (2, hybrid(Zero(1), ContextParallel(2), EP2), 1),
    "ep4 over dp2 x cp2": (4, hybrid(Zero(2), ContextParallel(2), ExpertParallel(4)), 2),
    "tp2 x pp2": (8, hybrid(DataParallel(2), PP2, TensorParallel(2), EP2), 2),
    "recomputed": (2, hybrid(Zero(2), ActivationCheckpoint(), EP2), 2),
    "compiled": (2, hybrid(DataParallel(2), Compile(backend="aot_eager"), EP2), 2),
}
WHOLE = PipelineParallel(2, microbatches=2, loss_over="batch")
OVER_BATCH = {
    "pp2": (4, hybrid(DataParallel(2), WHOLE, EP2), 2),
    "pp2 x zero3": (4, hybrid(Zero(2), WHOLE, EP2), 2),
    "tp2 x pp2": (8, hybrid(DataParallel(2), WHOLE, TensorParallel(2), EP2), 2),
}
"""For a loss that is no mean over samples, as one that balances routers."""

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "experts_implementation": "eager"}
COLUMNS = {
    "mixtral": SMALL,
    "qwen3_moe": SMALL,
    "olmoe": SMALL,
    "deepseek": SMALL,
    "gpt_oss": SMALL,
    "flat_experts": {},
    "banked_experts": {},
    "routed_mixtral": SMALL,
    "moe": {},
    "moe aux": {},
    "moe bias": {},
}

BALANCED = ("routed_mixtral", "moe aux")
OTHERS = (
    "penalized_banks",
    "tied_banks",
)


@covering(keep=1, layout=LAYOUTS, column=COLUMNS)
def test_trains_as_one_process_does(layout: str, column: str) -> None:
    exact = column.endswith("_experts") or column.startswith(
        "moe"
    )  # the others compute losses in single precision, whatever comes in
    ranks, strategy, readers = OVER_BATCH.get(layout, LAYOUTS[layout]) if column in BALANCED else LAYOUTS[layout]
    rtol = 1e-9 if exact else 1e-6
    check(column, ranks, strategy, readers, max_epochs=1, precision="64-true", rtol=rtol, model=COLUMNS[column])


@covering(keep=1, layout=("ep2", "zero3", "zero3, offloaded", "cp2"), column=OTHERS)
def test_penalties_and_tied_weights(layout: str, column: str) -> None:
    check(column, *LAYOUTS[layout], max_epochs=1, precision="64-true", rtol=1e-9)


@sampled(1, ("column", "samples"), [("banked_experts", 33), ("mixtral", 37), ("moe aux", 33), ("moe aux", 37)])
def test_uneven_batches_in_pipelines(column: str, samples: int) -> None:
    options: dict[str, Any] = {"max_epochs": 1, "precision": "64-true", "rtol": 1e-6, "data": {"samples": samples}}
    check(column, *LAYOUTS["pp2"], model=COLUMNS[column], **options)


@covering(keep=1, samples=(17, 9), column=("mixtral", "banked_experts"))
def test_uneven_batches_and_ranks_without_tokens_of_their_own(samples: int, column: str) -> None:
    data = {"samples": samples, "length": 2 if samples == 9 else 16}
    check(column, *LAYOUTS["ep4"], max_epochs=1, data=data, model=COLUMNS[column], accumulate_grad_batches=1)
