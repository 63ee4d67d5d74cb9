"""What tensor parallelism sends and keeps, counted on a group that only pretends to have other ranks.

A block does its work twice: what a model with one block more sends and keeps beyond another one is that block's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_parallel import HybridStrategy, TensorParallel
from lightning_parallel.techniques.divided.tensor import Divided
from tests.live import kept_for_backward
from tests.models import adamw, build, loaders
from tests.techniques.counts.test_wire import LastStep, Wire, world
from tests.trainers import trainer

assert world  # a fixture

T, SEQUENCE, BATCH, WIDTH = 4, 32, 2, 128
HIDDEN = SEQUENCE * BATCH * WIDTH * 4  # bytes of a hidden state in single precision
pytestmark = pytest.mark.parametrize("world", [(T, 0)], indirect=True)


def counted(module: LightningModule, **options: Any) -> Wire:
    last = LastStep(1)
    strategy = HybridStrategy(TensorParallel(T, **options), process_group_backend="fake", nonfinite="continue")
    data = loaders("gpt", BATCH, samples=2 * BATCH, length=SEQUENCE)
    trainer(strategy, max_epochs=1, limit_val_batches=0, callbacks=[last]).fit(module, *data)
    return last.wire


def gpt(blocks: int, **options: Any) -> LightningModule:
    sizes = {"dim": WIDTH, "n_heads": 4, "n_kv_heads": 4, "hidden_dim": 4 * WIDTH, "n_layers": blocks}
    return build("gpt", optimizer=adamw, **(sizes | options))


def of_one_block(**options: Any) -> tuple[Counter[str], Counter[str]]:
    more, fewer = counted(gpt(3), **options), counted(gpt(2), **options)
    return more.calls - fewer.calls, more.sent_by - fewer.sent_by


MESSAGES = {False: {"allreduce_": 4}, True: {"_allgather_base_": 4, "_reduce_scatter_base_": 4}}


@pytest.mark.parametrize("sequence_parallel", MESSAGES)
def test_block_sends_four_hidden_states(world: None, sequence_parallel: bool) -> None:
    calls, sent = of_one_block(sequence_parallel=sequence_parallel)
    assert calls == MESSAGES[sequence_parallel]
    if sequence_parallel:
        del sent["allreduce_"]  # the norms' gradients, in the one message of the step
    assert sum(sent.values()) == pytest.approx(8 * (T - 1) / T * HIDDEN, rel=0.01)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_loss_sends_numbers_for_tokens_not_for_the_vocabulary(world: None, sequence_parallel: bool) -> None:
    options = {"sequence_parallel": sequence_parallel}
    few, many = (counted(gpt(2, vocab_size=size), **options).sent for size in (64, 6400))
    assert few == many


def _local(parameter: Tensor) -> Tensor:
    return parameter.own if isinstance(parameter, Divided) else parameter


class Block(nn.Module):
    """A block whose activations the closed form describes: no biases, no dropout, fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            p(h).unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Blocks(LightningModule):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.kept = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.randn(BATCH, SEQUENCE, WIDTH, requires_grad=True)
        kept: list[Tensor] = [x]

        def run() -> None:
            for block in self.blocks:
                kept.append(block(kept[-1]))

        self.kept = kept_for_backward(run, map(_local, self.parameters()))
        return kept[-1].mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def kept_by_a_block(**options: Any) -> float:
    kept = []
    for blocks in (3, 2):
        module = Blocks(blocks)
        strategy = HybridStrategy(TensorParallel(T, **options), process_group_backend="fake", nonfinite="continue")
        trainer(strategy, max_steps=1).fit(module, torch.utils.data.DataLoader(torch.zeros(1)))
        kept.append(module.kept)
    return (kept[0] - kept[1]) / HIDDEN


# In units of a hidden state: the inputs of both norms (2) and of the maps after them (2), which are whole where the
# region needs the whole sequence; queries, keys, values and the input of the last map of attention (4), the input and
# the output of the activation (8), divided in any case.


def test_block_keeps_its_share(world: None) -> None:
    assert kept_by_a_block(sequence_parallel=False) == pytest.approx(4 + 12 / T, rel=0.02)
    assert kept_by_a_block() == pytest.approx(2 / T + 2 + 12 / T, rel=0.02)
