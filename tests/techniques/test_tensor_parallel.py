"""Tensor parallel trains as one process does: on every kind of model, beside every technique, at every size."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel import (
    ActivationCheckpoint,
    Compile,
    DataParallel,
    HybridStrategy,
    PipelineParallel,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
)
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.technique import Technique
from tests import models
from tests.curves import check_parity
from tests.models import VOCABULARY, build, loaders
from tests.ranks import ranks, run_on_ranks
from tests.techniques.tensor_layouts import TP2, TWO_BLOCKS, WHOLE_SEQUENCE, adamw, check, hybrid
from tests.tiers import covering, sampled
from tests.trainers import trainer

LAYOUTS = {
    "tp2": (2, TP2, 1),
    "tp2, whole sequence": (2, WHOLE_SEQUENCE, 1),
    "tp4": (4, partial(TensorParallelStrategy, 4), 1),
    "zero2 x tp2": (4, hybrid(Zero(2, stage=2), TensorParallel(2)), 2),
    "dp2 x tp2": (4, hybrid(DataParallel(2), TensorParallel(2)), 2),
}
COLUMNS = ("gpt", "llama", "gpt2", "plain", "qwen3", "phi3", "gpt_neox")
AS_MANY_KEYS_AS_RANKS = {name: {"num_key_value_heads": 4} for name in ("llama", "qwen3", "phi3")} | {
    "gpt": {"n_kv_heads": 4}
}


@covering(keep=1, layout=LAYOUTS, column=COLUMNS)
def test_a_layout_trains_as_one_process_does(layout: str, column: str) -> None:
    n, strategy, data_ranks = LAYOUTS[layout]
    model = AS_MANY_KEYS_AS_RANKS.get(column, {}) if layout == "tp4" else {}
    check(column, n, strategy, data_ranks, model=model, max_epochs=2 if n == 2 else 1)


def compiled() -> HybridStrategy:
    warnings.simplefilter("ignore")  # torch.compile itself raises some of them while it traces functions of autograd
    return HybridStrategy(TensorParallel(2), Compile(backend="aot_eager"))


@sampled(
    1,
    ("column", "n", "strategy", "data_ranks"),
    [
        ("gpt2", 4, hybrid(Zero(2), TensorParallel(2)), 2),
        ("phi3", 4, hybrid(Zero(2, stage=1), TensorParallel(2)), 2),
        ("llama", 8, hybrid(Zero(2, replicate=2), TensorParallel(2)), 4),
        ("llama", 2, hybrid(TensorParallel(2), ActivationCheckpoint()), 1),
        ("gpt2", 2, hybrid(TensorParallel(2, sequence_parallel=False), ActivationCheckpoint("selective")), 1),
        ("llama", 4, hybrid(PipelineParallel(2), TensorParallel(2)), 1),
        ("gpt2", 4, hybrid(PipelineParallel(2, schedule="zbv", microbatches=4), TensorParallel(2)), 1),
        ("gpt2", 8, hybrid(PipelineParallel(2), Zero(2, stage=2), TensorParallel(2)), 2),
        ("llama", 2, partial(TensorParallelStrategy, 2), 1),
        ("qwen3", 2, hybrid(TensorParallel(2), ActivationCheckpoint()), 1),
        ("llama", 4, hybrid(PipelineParallel(2, microbatches=2), TensorParallel(2), ActivationCheckpoint()), 1),
    ],
    ids=lambda value: str(value.args) if isinstance(value, partial) else str(value),
)
def test_beside_other_techniques(column: str, n: int, strategy: Any, data_ranks: int) -> None:
    check(column, n, strategy, data_ranks, max_epochs=1, model={"n_layer": 4} if column == "gpt2" else {})


@pytest.mark.exhaustive  # by default `test_compile.py` has a model whose weights are fused
def test_compiled_blocks() -> None:
    check("llama", 2, compiled, max_epochs=1, model={"num_hidden_layers": 1}, limit_val_batches=0)


@sampled(1, "column", ["gpt", "llama"])
def test_in_double_precision_only_rounding_differs(column: str) -> None:
    check(column, 2, TP2, precision="64-true", rtol=1e-9, max_epochs=1)


@sampled(
    2,
    ("column", "options"),
    [
        ("llama", {"data": {"length": 15}}),
        ("llama", {"data": {"length": 1}}),
        ("gpt2", {"model": {"vocab_size": VOCABULARY + 3}}),
        ("llama", {"model": {"vocab_size": VOCABULARY + 3}, "data": {"ignored": 0.3}}),
    ],
    ids=["odd length", "one token", "odd vocabulary, tied", "odd vocabulary"],
)
def test_sizes_that_ranks_do_not_divide(column: str, options: dict[str, Any]) -> None:
    check(column, 2, TP2, max_epochs=1, **options)


@sampled(
    1,
    "optimizer",
    [
        partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
        partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, foreach=True),
        partial(torch.optim.Adafactor, lr=1e-2),
    ],
    ids=["fused", "foreach", "looks at whole parameters"],
)
def test_optimizers(optimizer: Any) -> None:
    check("llama", 2, TP2, model={"optimizer": optimizer}, max_epochs=1, rtol=2e-5)


def test_clipping_by_value() -> None:
    check("llama", 2, TP2, gradient_clip_val=0.01, gradient_clip_algorithm="value", max_epochs=1)


@sampled(1, ("precision", "rtol"), [("bf16-mixed", 3e-2), ("bf16-true", 5e-2)])
def test_low_precision(precision: str, rtol: float) -> None:
    check("llama", 2, TP2, precision=precision, rtol=rtol, max_epochs=1)


# ---------------------------------------------------------------- users' own losses and metrics


@sampled(1, "strategy", [TP2, WHOLE_SEQUENCE])
def test_all_that_users_do_with_logits(strategy: Any) -> None:
    check_parity("many uses", 2, strategy, max_epochs=1)


def predictions(strategy: Any) -> list[Tensor]:
    module = build("gpt2")
    outputs = trainer(strategy).predict(module, loaders("gpt2", 8).val)
    assert all(type(output) is Tensor for output in outputs)
    return outputs


def test_predictions_are_whole() -> None:
    (expected,) = run_on_ranks(1, predictions, "auto")
    for rank in run_on_ranks(2, predictions, TP2()):
        torch.testing.assert_close(rank, expected)


# ---------------------------------------------------------------- randomness


class Masks(models.Optimized):
    """One block that tells which activations dropout kept, between regions and within one."""

    def __init__(self, inner: float, outer: float) -> None:
        super().__init__()
        self.make_optimizer = adamw
        self.blocks = nn.ModuleList(Dropping(inner, outer) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.ones(2, 8, 16)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def own(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.own if isinstance(tensor, Divided) else tensor


class Notes:
    """An object that recomputations write to as well: of what lies in one nobody knows."""

    def __init__(self) -> None:
        self.inner: list[Tensor] = []
        self.outer: list[Tensor] = []


class Dropping(nn.Module):
    def __init__(self, inner: float, outer: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.rate, self.outer = inner, nn.Dropout(outer)  # of the inner one no module tells
        self.kept = Notes()

    def forward(self, x: Tensor) -> Tensor:
        inner = F.dropout(torch.ones_like(hidden := self.up(x)), self.rate)
        outer = self.outer(torch.ones_like(result := self.down(hidden * inner)))
        if not x.is_meta:
            self.kept.inner.append(own(inner.detach() > 0))
            self.kept.outer.append(own(outer.detach() > 0))
        return x + result * outer


def masks_of(sequence_parallel: bool, *others: Technique) -> dict[str, list[Tensor]]:
    module = Masks(0.5, 0.5)
    strategy = HybridStrategy(TensorParallel(2, sequence_parallel=sequence_parallel), *others)
    data = torch.utils.data.DataLoader(torch.zeros(2, 1))
    trainer(strategy, max_steps=2).fit(module, data)
    notes = [block.kept for block in module.blocks]
    return {
        "inner": [each for own in notes for each in own.inner],
        "outer": [each for own in notes for each in own.outer],
    }


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_dropout_differs_where_activations_do(sequence_parallel: bool) -> None:
    first, second = run_on_ranks(2, masks_of, sequence_parallel)
    for mine, other in zip(first["inner"], second["inner"], strict=True):
        assert not torch.equal(mine, other)
    for mine, other in zip(first["outer"], second["outer"], strict=True):
        assert torch.equal(mine, other) is not sequence_parallel
    assert not torch.equal(first["inner"][0], first["inner"][1])


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_recomputation_drops_the_same(sequence_parallel: bool) -> None:
    for kept in run_on_ranks(2, masks_of, sequence_parallel, ActivationCheckpoint()):
        for masks in kept.values():
            seen = [mask.numpy().tobytes() for mask in masks]
            assert all(seen.count(mask) == 2 for mask in seen), "each mask is drawn once and recomputed once"


# ---------------------------------------------------------------- after the run


@ranks(2)
def test_the_module_is_as_it_was_afterwards() -> None:
    module = build("gpt2")
    before = {name: dict(vars(part)) for name, part in module.named_modules()}
    trainer(TP2(), max_steps=2).fit(module, *loaders("gpt2", 4))
    for name, part in module.named_modules():
        assert "forward" not in vars(part)
        assert not part._forward_pre_hooks
        assert not part._forward_hooks
        known = {key: value for key, value in vars(part).items() if isinstance(value, int | float)}
        assert known == {key: before[name][key] for key in known}
    logits = module.network(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits
    assert type(logits) is Tensor
    assert logits.shape == (1, 3, VOCABULARY)


def saved(path: str, strategy: Any, epochs: int, load: str | None, column: str) -> list[Tensor]:
    return saved_by(path, strategy, epochs, load, column, 8)


def saved_by(path: str, strategy: Any, epochs: int, load: str | None, column: str, batch_size: int) -> list[Tensor]:
    module = build(column, optimizer=adamw, **TWO_BLOCKS.get(column, {}))
    run = trainer(strategy(), max_epochs=epochs)
    run.fit(module, *loaders(column, batch_size, samples=16, val_samples=8), ckpt_path=load)
    run.save_checkpoint(path)
    return [value.detach().clone() for value in module.state_dict().values()]


@sampled(1, "column", ["phi3", "gpt2"])
def test_checkpoints_into_and_out_of_other_layouts(tmp_path: Any, column: str) -> None:
    whole = run_on_ranks(1, saved, str(tmp_path / "0"), partial(HybridStrategy), 2, None, column)[0]
    first, then = str(tmp_path / "1"), str(tmp_path / "2")
    run_on_ranks(2, saved, first, TP2, 1, None, column)
    layout = hybrid(Zero(2, stage=1), TensorParallel(2, sequence_parallel=False))
    # The samples of a batch are divided over two ranks there.
    found = run_on_ranks(4, saved_on_two, then, layout, 2, first, column)[0]
    for wanted, got in zip(whole, found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def saved_on_two(path: str, strategy: Any, epochs: int, load: str | None, column: str) -> list[Tensor]:
    return saved_by(path, strategy, epochs, load, column, 4)
