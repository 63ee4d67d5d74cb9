"""What tests of tensor parallelism share: the layouts of two ranks, and parity over a short run."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lightning_parallel import HybridStrategy, TensorParallelStrategy
from lightning_parallel.techniques.technique import Technique
from tests.curves import check_parity

# AdamW divides small gradients by their own size; its eps keeps the noise of another order of sums out of the weights.
adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
STEPS: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
SHORT = {"samples": 24, "val_samples": 8}


def hybrid(*techniques: Technique) -> partial[HybridStrategy]:
    return partial(HybridStrategy, *techniques)


def check(column: str, n: int, strategy: Any, data_ranks: int = 1, **options: Any) -> None:
    model = TWO_BLOCKS.get(column, {}) | ({} if column == "plain" else {"optimizer": adamw})
    options = STEPS | options
    options["data"] = SHORT | options.get("data", {})
    check_parity(column, n, strategy, data_ranks=data_ranks, **(options | {"model": model | options.get("model", {})}))


TWO_BLOCKS = {"gpt": {"n_layers": 2}, "llama": {"num_hidden_layers": 2}, "gpt2": {"n_layer": 2}, "plain": {"blocks": 2}}
TP2 = partial(TensorParallelStrategy, 2)
WHOLE_SEQUENCE = partial(TensorParallelStrategy, 2, sequence_parallel=False)
