"""Compiled blocks train the same; each kind of block is compiled once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.strategies.hybrid import HybridStrategy
from lightning_parallel.techniques.activation_checkpoint import ActivationCheckpoint
from lightning_parallel.techniques.compile import Compile
from lightning_parallel.techniques.data_parallel import DataParallel
from lightning_parallel.techniques.tensor_parallel import TensorParallel
from lightning_parallel.techniques.tools.redirect import restore_forward
from lightning_parallel.techniques.zero import Zero
from tests.curves import check_parity
from tests.grounds import ground
from tests.models import build, loaders
from tests.tiers import sampled

pytestmark = [  # Dynamo's own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

COMPILED = Compile(backend="aot_eager")
LAYOUTS: dict[str, tuple[str, Callable[[], list[Any]]]] = {
    "data parallel": ("gpt2", lambda: [DataParallel(2), COMPILED]),
    "zero 1": ("llama", lambda: [Zero(2, stage=1), COMPILED]),
    "zero 2": ("llama", lambda: [Zero(2, stage=2), COMPILED]),
    "zero 3": ("gpt2", lambda: [Zero(2, stage=3), COMPILED]),
    "zero 3, recomputed": ("llama", lambda: [Zero(2, stage=3), COMPILED, ActivationCheckpoint()]),
}


@sampled(2, "layout", LAYOUTS)
def test_parity(layout: str) -> None:
    column, techniques = LAYOUTS[layout]
    make = partial(HybridStrategy, *techniques())
    check_parity(column, 2, make, data_ranks=2, max_epochs=1, limit_val_batches=0)


def test_gradients_of_divided_fused_weights_add_up() -> None:
    make = partial(HybridStrategy, TensorParallel(2), COMPILED)
    check_parity("gpt2", 2, make, max_epochs=1, limit_val_batches=0, model={"n_layer": 1}, data={"samples": 32})


def test_blocks_share_one_graph() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model: nn.Module = build("llama")
    technique: Any = COMPILED
    technique.divide(model, ground(model), None)
    model.loss(next(iter(loaders("llama", 4).train))).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for module in model.modules():
        restore_forward(module)
