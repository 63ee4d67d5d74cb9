"""Context parallel trains as one process does."""

from __future__ import annotations

from functools import partial

from lightning_parallel import ContextParallel, ContextParallelStrategy, PipelineParallel, TensorParallel, Zero
from tests.techniques.tensor_layouts import check, hybrid
from tests.tiers import covering

CP2 = partial(ContextParallelStrategy, 2)
LAYOUTS = {
    "cp2": (2, CP2, 1),
    "zero2 x cp2": (4, hybrid(Zero(2, stage=2), ContextParallel(2)), 2),
    "zero3 x cp2": (4, hybrid(Zero(2), ContextParallel(2)), 2),
    "pp2 x cp2": (4, hybrid(PipelineParallel(2, microbatches=2), ContextParallel(2)), 1),
    "cp2 x tp2": (4, hybrid(ContextParallel(2), TensorParallel(2)), 1),
}
COLUMNS = ("gpt", "llama", "gpt2", "qwen3", "phi3", "gpt_neox")


@covering(keep=4, layout=LAYOUTS, column=COLUMNS)
def test_a_layout_trains_as_one_process_does(layout: str, column: str) -> None:
    n, strategy, data_ranks = LAYOUTS[layout]
    check(column, n, strategy, data_ranks, max_epochs=1, data={"samples": 32, "val_samples": 8})
