"""Context parallel trains as one process does."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_parallel import (
    ActivationCheckpoint,
    Compile,
    ContextParallel,
    ContextParallelStrategy,
    DataParallel,
    PipelineParallel,
    TensorParallel,
    Zero,
)
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.context_parallel.attention import ContextAttention
from lightning_parallel.techniques.context_parallel.technique import DividedSequences
from tests.heard import heard
from tests.layouts import hybrid
from tests.live import kept_for_backward
from tests.models import build, loaders
from tests.ranks import ranks
from tests.techniques.parity import check
from tests.trainers import trainer

CP2, PART = partial(ContextParallelStrategy, 2), ContextParallel(2)
PACKED = {"data": {"documents": True}}
LONG = {
    "precision": "32-true",
    "rtol": 1e-5,
    "global_batch": 2,
    "data": {"samples": 4, "val_samples": 2, "length": 4096},
    "model": {"context": 4096, "optimizer": partial(torch.optim.SGD, lr=0.1)},
}
ROWS: dict[str, tuple[str, int, Any, int, dict[str, Any]]] = {
    "ring of four": ("llama", 4, partial(ContextParallelStrategy, 4, method="ring"), 1, {}),
    "auto": ("gpt2", 2, CP2, 1, {}),
    "ulysses": ("qwen3", 2, partial(CP2, method="ulysses"), 1, {}),
    "all_gather": ("phi3", 2, partial(CP2, method="all_gather"), 1, {}),
    "in order": ("mistral", 2, partial(CP2, load_balance=False), 1, {}),
    "hybrid, packed": ("gpt", 4, partial(ContextParallelStrategy, 4, method="hybrid", ulysses_size=2), 1, PACKED),
    "ring, packed": ("gpt", 2, partial(CP2, method="ring"), 1, PACKED),
    "ulysses, packed": ("gpt", 2, partial(CP2, method="ulysses"), 1, PACKED),
    "all_gather, packed": ("gpt", 2, partial(CP2, method="all_gather"), 1, PACKED),
    "pipeline, packed": ("gpt", 4, hybrid(PipelineParallel(2, microbatches=2), PART), 1, PACKED),
    "data parallel": ("llama", 4, hybrid(DataParallel(2), PART), 2, {}),
    "zero 2": ("gpt", 4, hybrid(Zero(2, stage=2), PART), 2, {}),
    "zero 3 over": ("gpt", 2, hybrid(Zero(1), PART), 1, {}),
    "zero 3": ("llama", 4, hybrid(Zero(2), PART), 2, {}),
    "tensor": ("llama", 4, hybrid(PART, TensorParallel(2)), 1, {}),
    "pipeline x tensor": ("gpt", 8, hybrid(PipelineParallel(2), PART, TensorParallel(2)), 1, {}),
    "recomputed": ("llama", 2, hybrid(PART, ActivationCheckpoint()), 1, {}),
    "compiled": ("gpt", 2, hybrid(PART, Compile(backend="aot_eager")), 1, {}),
    "long, ring": ("gpt", 2, partial(CP2, method="ring"), 1, LONG),
    "long, ulysses": ("gpt", 2, partial(CP2, method="ulysses"), 1, LONG),
}
DEFAULT = ("hybrid, packed", "zero 3")


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row in DEFAULT else (pytest.mark.exhaustive,)) for row in ROWS]
)
def test_context_parallel_trains_as_one_process(row: str) -> None:
    column, n, strategy, data_ranks, options = ROWS[row]
    rtol = 1e-9 if column in ("gpt", "llama") else 1e-6  # the other losses are computed in single precision
    data = {"length": 19, "ignored": 0.3} | options.get("data", {})
    check(column, n, strategy, data_ranks, **({"precision": "64-true", "rtol": rtol} | options | {"data": data}))


class Sends(nn.Module):
    """A block whose attention sends messages, and whose feed-forward sends none."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.feed = nn.Linear(8, 24), nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return self.feed(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


class Sending(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(64, 8), nn.ModuleList(Sends() for _ in range(2))

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.words(batch["input_ids"])
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@ranks(2)
def test_blocks_that_send_messages_run_as_they_are() -> None:
    """Their parts that send none are compiled."""
    warnings.simplefilter("ignore")  # the compiler itself raises some of them
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with heard() as said:
        run = trainer(ROWS["compiled"][2](), max_steps=1, limit_val_batches=0)
        run.fit(Sending(), *loaders("gpt", 4))
    told = [line for line in said if "attention over a divided sequence" in line]
    assert bool(told) == (run.global_rank == 0), said
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


@pytest.mark.parametrize("column", ["gpt", pytest.param("llama", marks=pytest.mark.exhaustive)])
@ranks(4)
def test_activations_are_divided_logits_and_loss_too(column: str) -> None:
    length = 512
    model = build(column, **({"context": length} if column == "gpt" else {"max_position_embeddings": length}))
    model.configure_model()
    loss = model._loss if column == "gpt" else model.loss
    batch = {name: torch.arange(2 * length).view(2, length) % 7 for name in ("input_ids", "labels")}
    among = Ranks(dist.group.WORLD, "cp")
    among.averages, among.attention = lambda _: True, ContextAttention("ring")
    divided = DividedSequences(model, among, 1, ContextParallel()).divided(batch)
    alone = kept_for_backward(lambda: loss(batch), model.parameters())
    assert kept_for_backward(lambda: loss(divided), model.parameters()) == pytest.approx(alone / among.count, rel=0.03)
    assert not among.gathered
