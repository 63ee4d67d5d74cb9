"""Tensor parallel trains as one process does: on every kind of model, beside every technique, at every size."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel import (
    ActivationCheckpoint,
    DataParallel,
    HybridStrategy,
    PipelineParallel,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
)
from lightning_parallel.techniques.divided.tensor import Divided
from tests import models
from tests.layouts import hybrid
from tests.models import VOCABULARY, build, loaders
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import require_like
from tests.techniques.parity import TP2, WHOLE_SEQUENCE, adamw, check
from tests.trainers import trainer

TP4, PART = partial(TensorParallelStrategy, 4), TensorParallel(2)
SIZES = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2}
THREE = {**SIZES, "num_attention_heads": 3, "num_key_value_heads": 3}
ONE_FOR_THREE = THREE | {"num_key_value_heads": 1}
GROUPS = {**SIZES, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
ROWS: dict[str, tuple[str, int, Any, int, dict[str, Any]]] = {
    "odd sizes": ("llama", 2, TP2, 1, {"model": {"vocab_size": 67}, "data": {"length": 15, "ignored": 0.3}}),
    "gpt, zero 2": ("gpt", 4, hybrid(Zero(2, stage=2), PART), 2, {}),
    "plain": ("plain", 2, TP2, 1, {}),
    "plain, sequence whole": ("plain", 2, WHOLE_SEQUENCE, 1, {}),
    "qwen3, data parallel": ("qwen3", 4, hybrid(DataParallel(2), PART), 2, {}),
    "gpt_neox": ("gpt_neox", 2, TP2, 1, {}),
    "gpt2 of four ranks": ("gpt2", 4, TP4, 1, {}),
    "phi3, zero 1": ("phi3", 4, hybrid(Zero(2, stage=1), PART), 2, {}),
    "gpt2, zero 3": ("gpt2", 4, hybrid(Zero(2), PART), 2, {}),
    "hsdp": ("llama", 8, hybrid(Zero(2, replicate=2), PART), 4, {}),
    "pipeline": ("llama", 4, hybrid(PipelineParallel(2, microbatches=2), PART, ActivationCheckpoint()), 1, {}),
    "zbv": ("gpt2", 4, hybrid(PipelineParallel(2, schedule="zbv", microbatches=4), PART), 1, {"model": {"n_layer": 4}}),
    "pipeline x zero 2": ("gpt2", 8, hybrid(PipelineParallel(2), Zero(2, stage=2), PART), 2, {}),
    "recomputed": ("llama", 2, hybrid(PART, ActivationCheckpoint()), 1, {}),
    "recomputed selectively": (
        *("gpt2", 2, hybrid(TensorParallel(2, sequence_parallel=False), ActivationCheckpoint("selective")), 1, {}),
    ),
    "three heads": ("llama", 2, TP2, 1, {"model": THREE}),
    "one head of keys for three, fused": ("phi3", 2, TP2, 1, {"model": ONE_FOR_THREE}),
    "one head of keys for three, zero 3": ("llama", 4, hybrid(Zero(2), PART), 2, {"model": ONE_FOR_THREE}),
    "one head of keys, pipeline": ("llama", 4, hybrid(PipelineParallel(2), PART), 1, {"model": ONE_FOR_THREE}),
    "two heads of keys, four ranks": ("llama", 4, TP4, 1, {}),
    "three groups, four ranks": ("llama", 4, TP4, 1, {"model": GROUPS}),
    "one head": ("gpt2", 2, WHOLE_SEQUENCE, 1, {"model": {"n_head": 1, "n_embd": 8}}),
    "three heads, zero 1": ("gpt2", 4, hybrid(Zero(2, stage=1), PART), 2, {"model": {"n_head": 3, "n_embd": 24}}),
    "one token": ("llama", 2, TP2, 1, {"data": {"length": 1}}),
    "odd vocabulary, tied": ("gpt2", 2, TP2, 1, {"model": {"vocab_size": VOCABULARY + 3}}),
    "fused optimizer": ("llama", 2, TP2, 1, {"model": {"optimizer": partial(adamw, fused=True)}}),
    "optimizer of whole parameters": (
        *("llama", 2, TP2, 1, {"rtol": 2e-5, "model": {"optimizer": partial(torch.optim.Adafactor, lr=1e-2)}}),
    ),
    "clipped by value": ("llama", 2, TP2, 1, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "mixed": ("llama", 2, TP2, 1, {"precision": "bf16-mixed", "rtol": 3e-2}),
    "bf16": ("llama", 2, TP2, 1, {"precision": "bf16-true", "rtol": 5e-2}),
}
DEFAULT = ("odd sizes", "gpt2, zero 3", "one head of keys for three, fused", "optimizer of whole parameters")


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row in DEFAULT else (pytest.mark.exhaustive,)) for row in ROWS]
)
def test_tensor_parallel_trains_as_one_process(row: str) -> None:
    column, n, strategy, data_ranks, options = ROWS[row]
    rtol = 1e-8 if column in ("gpt", "llama") else 1e-5  # the losses of the others are computed in single precision
    check(column, n, strategy, data_ranks, **({"precision": "64-true", "rtol": rtol} | options))


class Dropping(nn.Module):
    """Tells which activations dropout kept, between regions and within one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.kept = Notes()

    def forward(self, x: Tensor) -> Tensor:
        inner = F.dropout(torch.ones_like(hidden := self.up(x)), 0.5)  # of which no module tells
        outer = F.dropout(torch.ones_like(result := self.down(hidden * inner)), 0.5)
        if not x.is_meta:
            for mask, notes in ((inner, self.kept.inner), (outer, self.kept.outer)):
                notes.append((mask.own if isinstance(mask, Divided) else mask).detach() > 0)
        return x + result * outer


class Notes:
    """An object that recomputations write to as well: of what lies in one nobody knows."""

    def __init__(self) -> None:
        self.inner: list[Tensor] = []
        self.outer: list[Tensor] = []


class Masks(models.Optimized):
    def __init__(self) -> None:
        super().__init__()
        self.make_optimizer, self.blocks = adamw, nn.ModuleList(Dropping() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.ones(2, 8, 16)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def masks_of(sequence_parallel: bool) -> dict[str, list[Tensor]]:
    strategy = HybridStrategy(TensorParallel(2, sequence_parallel=sequence_parallel), ActivationCheckpoint())
    trainer(strategy, max_steps=2).fit(module := Masks(), torch.utils.data.DataLoader(torch.zeros(2, 1)))
    return {name: [each for block in module.blocks for each in vars(block.kept)[name]] for name in ("inner", "outer")}


@pytest.mark.parametrize("sequence_parallel", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_dropout_differs_where_activations_do(sequence_parallel: bool) -> None:
    """Recomputations draw what the forward drew."""
    found = first, second = run_on_ranks(2, masks_of, sequence_parallel)
    for masks in (masks for kept in found for masks in kept.values()):
        seen = [mask.numpy().tobytes() for mask in masks]
        assert all(seen.count(mask) == 2 for mask in seen), "each mask is drawn once and recomputed once"
    for mine, other in zip(first["inner"], second["inner"], strict=True):
        assert not torch.equal(mine, other)
    for mine, other in zip(first["outer"], second["outer"], strict=True):
        assert torch.equal(mine, other) is not sequence_parallel


def after_a_run(strategy: Any) -> list[Tensor]:
    """What is predicted; the module is as it was before."""
    module = build("gpt2", n_layer=2)
    before = {name: dict(vars(part)) for name, part in module.named_modules()}
    trainer(strategy(), max_steps=2).fit(module, *loaders("gpt2", 4))
    for name, part in module.named_modules():
        assert "forward" not in vars(part)
        assert not part._forward_pre_hooks
        assert not part._forward_hooks
        known = {key: value for key, value in vars(part).items() if isinstance(value, int | float)}
        assert known == {key: before[name][key] for key in known}
    outputs = [module.network(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits.detach()]
    outputs += trainer(strategy()).predict(module, loaders("gpt2", 8).val)
    assert all(type(output) is Tensor for output in outputs)
    return outputs


def test_module_is_whole_after_a_run() -> None:
    expected = begun_on_one(after_a_run, HybridStrategy)
    for found in run_on_ranks(2, after_a_run, TP2):
        require_like(expected.result(), found, 1e-4)
