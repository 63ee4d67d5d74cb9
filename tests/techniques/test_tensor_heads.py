"""Heads, and features, that ranks cannot share evenly train as one process does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_parallel import HybridStrategy, PipelineParallel, TensorParallel, TensorParallelStrategy, Zero
from lightning_parallel.techniques.tensor_parallel.heads import Heads
from tests.models import build, loaders
from tests.ranks import run_on_ranks
from tests.techniques.tensor_layouts import TP2, WHOLE_SEQUENCE, adamw, check, hybrid
from tests.tiers import sampled
from tests.trainers import trainer

TP4 = partial(TensorParallelStrategy, 4)
SIZES: dict[str, dict[str, Any]] = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2}
THREE = {**SIZES, "num_attention_heads": 3, "num_key_value_heads": 3}
ONE_FOR_THREE = {**SIZES, "num_attention_heads": 3, "num_key_value_heads": 1}
TWO_FOR_FOUR = {"num_attention_heads": 4, "num_key_value_heads": 2}
GROUPS = {**SIZES, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}


@sampled(
    1,
    ("column", "n", "strategy", "data_ranks", "model"),
    [
        ("llama", 2, TP2, 1, THREE),
        ("llama", 4, TP4, 1, TWO_FOR_FOUR),
        ("phi3", 2, TP2, 1, ONE_FOR_THREE),
        ("gpt2", 2, WHOLE_SEQUENCE, 1, {"n_head": 1, "n_embd": 8, "n_layer": 2}),
        ("llama", 4, hybrid(Zero(2, stage=2), TensorParallel(2)), 2, ONE_FOR_THREE),
        ("llama", 4, hybrid(Zero(2), TensorParallel(2)), 2, ONE_FOR_THREE),
        ("llama", 4, hybrid(PipelineParallel(2), TensorParallel(2)), 1, ONE_FOR_THREE),
        ("llama", 2, TP2, 1, GROUPS),
        ("llama", 4, TP4, 1, GROUPS),
        ("llama", 2, TP2, 1, ONE_FOR_THREE),
        ("gpt2", 2, TP2, 1, {"n_head": 3, "n_embd": 24, "n_layer": 2}),
        ("gpt2", 4, hybrid(Zero(2, stage=1), TensorParallel(2)), 2, {"n_head": 3, "n_embd": 24, "n_layer": 2}),
        ("phi3", 4, TP4, 1, TWO_FOR_FOUR),
        ("qwen3", 4, TP4, 1, TWO_FOR_FOUR),
    ],
    ids=lambda value: str(value.args) if isinstance(value, partial) else str(value),
)
def test_any_number_of_heads(column: str, n: int, strategy: Any, data_ranks: int, model: dict[str, Any]) -> None:
    data = {"samples": 24, "val_samples": 8}
    rtol = 1e-8 if column == "llama" else 1e-5  # the losses of the others are computed in single precision
    check(column, n, strategy, data_ranks, precision="64-true", rtol=rtol, max_epochs=1, data=data, model=model)


@pytest.mark.parametrize(
    ("heads", "size", "ranks", "expected"),
    [
        (Heads(4, 2, 2), 8, 2, [[(0, 4)], [(4, 8)]]),
        (Heads(4, 2, 2), 4, 2, [[(0, 2)], [(2, 4)]]),
        (Heads(3, 2, 3), 6, 2, [[(0, 4)], [(4, 6)]]),
        (Heads(3, 2, 3), 18, 2, [[(0, 12)], [(12, 18)]]),
        (Heads(6, 2, 3), 12, 2, [[(0, 8)], [(8, 12)]]),
        (Heads(1, 2, 1), 2, 3, [[(0, 2)], [], []]),
    ],
)
def test_which_heads_ranks_get(heads: Heads, size: int, ranks: int, expected: list[list[tuple[int, int]]]) -> None:
    assert heads.runs(size, ranks) == [tuple(runs) for runs in expected]


@pytest.mark.parametrize(
    ("heads", "size", "ranks", "whole"),
    [
        (Heads(4, 2, 2), 4, 4, True),
        (Heads(4, 2, 2), 4, 2, False),
        (Heads(4, 2, 2), 8, 4, False),
        (Heads(6, 2, 2), 4, 3, True),
        (Heads(3, 2, 1), 2, 2, True),
        (Heads(1, 2, 1), 2, 3, False),
    ],
)
def test_fewer_heads_of_keys_than_ranks_stay_whole(heads: Heads, size: int, ranks: int, whole: bool) -> None:
    assert heads.stay_whole(size, ranks) is whole


def resumed(path: str, strategy: Any, epochs: int, load: str | None) -> list[Tensor]:
    module = build("llama", optimizer=adamw, **ONE_FOR_THREE)
    run = trainer(strategy(), max_epochs=epochs, enable_checkpointing=False, gradient_clip_val=0.1)
    run.fit(module, *loaders("llama", 8), ckpt_path=load)
    run.save_checkpoint(path)
    return [value.detach().clone() for value in module.state_dict().values()]


def test_checkpoints_of_a_head_of_keys_for_three_of_queries(tmp_path: Any) -> None:
    paths = [str(tmp_path / str(k)) for k in range(4)]
    (whole,) = run_on_ranks(1, resumed, paths[0], HybridStrategy, 2, None)
    run_on_ranks(1, resumed, paths[1], HybridStrategy, 1, None)
    for found in run_on_ranks(2, resumed, paths[2], TP2, 2, paths[1]):
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)
    run_on_ranks(2, resumed, paths[3], TP2, 1, None)
    (found,) = run_on_ranks(1, resumed, paths[2], HybridStrategy, 2, paths[3])
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)
