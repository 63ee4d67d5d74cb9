"""Parity over a short run of a small model, for tests of tensor, context and expert parallelism."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lightning_parallel import TensorParallelStrategy
from tests.curves import check_parity

# AdamW divides small gradients by their own size; its eps keeps the noise of another order of sums out of the weights.
adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
SHORT = {"samples": 24, "val_samples": 8}
TWO_BLOCKS = {"gpt": {"n_layers": 2}, "llama": {"num_hidden_layers": 2}, "gpt2": {"n_layer": 2}, "plain": {"blocks": 2}}
TP2 = partial(TensorParallelStrategy, 2)
WHOLE_SEQUENCE = partial(TensorParallelStrategy, 2, sequence_parallel=False)


def check(column: str, n: int, strategy: Any, data_ranks: int = 1, **options: Any) -> None:
    """Holds two accumulated batches an optimizer step, with clipped gradients, to one process; for one epoch."""
    model = TWO_BLOCKS.get(column, {}) | ({} if column == "plain" else {"optimizer": adamw})
    options = {"max_epochs": 1, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5} | options
    options["data"] = SHORT | options.get("data", {})
    options["model"] = model | options.get("model", {})
    check_parity(column, n, strategy, data_ranks=data_ranks, **options)
