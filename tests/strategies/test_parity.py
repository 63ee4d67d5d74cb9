"""The parity table: every layout trains every model as one process does.

Each cell is a whole curve of more than twenty steps, with accumulation and clipping: losses, metrics on every rank,
final weights.
"""

from functools import partial

import pytest

from lightning_parallel import ActivationCheckpoint, DataParallelStrategy, HybridStrategy, Zero, ZeroStrategy
from tests.curves import check_parity
from tests.tiers import covering, sampled

COLUMNS = ("gpt", "llama", "gpt2", "plain")
LAYOUTS = {
    "none": (1, HybridStrategy),
    "dp2": (2, DataParallelStrategy),
    "dp4": (4, DataParallelStrategy),
    "zero1": (2, partial(ZeroStrategy, stage=1)),
    "zero2": (2, partial(ZeroStrategy, stage=2)),
    "zero3": (2, partial(ZeroStrategy, stage=3)),
    "zero3 on 4": (4, partial(ZeroStrategy, stage=3)),
    "hsdp 2x2": (4, partial(ZeroStrategy, 2, replicate=2)),
}
TWO_BLOCKS = {"gpt": {"n_layers": 2}, "llama": {"num_hidden_layers": 2}, "gpt2": {"n_layer": 2}, "plain": {"blocks": 2}}
STEPS = {
    "max_epochs": 2,
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.5,
    "data": {"samples": 96, "val_samples": 16},
}


@covering(keep=1, layout=LAYOUTS, column=COLUMNS)
def test_a_layout_trains_as_one_process_does(layout, column):
    ranks, strategy = LAYOUTS[layout]
    check_parity(column, ranks, strategy, data_ranks=ranks, model=TWO_BLOCKS[column], **STEPS)


@covering(keep=1, layout=("zero3", "dp2", "zero1", "zero2"), column=COLUMNS)
def test_in_double_precision_only_rounding_differs(layout, column):
    ranks, strategy = LAYOUTS[layout]
    # Hugging Face's own loss turns logits into single precision, whatever the model computes in.
    rtol = 1e-6 if column == "gpt2" else 1e-10
    check_parity(column, ranks, strategy, data_ranks=ranks, rtol=rtol, precision="64-true", max_epochs=1)


@pytest.mark.exhaustive
@sampled(1, "stage", [1, 2])
def test_replicas_of_shards_in_the_lower_stages(stage):
    check_parity("llama", 4, partial(ZeroStrategy, 2, replicate=2, stage=stage), data_ranks=4, **STEPS)


def sharded_and_recomputed():
    return HybridStrategy(ActivationCheckpoint(), Zero())


@pytest.mark.exhaustive
def test_order_of_techniques_has_no_meaning():
    check_parity("llama", 2, sharded_and_recomputed, data_ranks=2, **STEPS)
