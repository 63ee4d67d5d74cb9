"""What any layout wrote, any other reads bit for bit, and trains on like one device that never stopped."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_parallel import (
    ContextParallel,
    DataParallel,
    ExpertParallel,
    ExpertParallelStrategy,
    HybridStrategy,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from lightning_parallel.checkpoint.files import TensorsFile
from lightning_parallel.checkpoint.folder import read_manifest
from lightning_parallel.strategies.checkpoint.resumption import POSITIONS, RANDOMNESS
from tests.curves import Curve, Recorder, compare_weights, whole
from tests.layouts import PP2, TP2, Layout, hybrid, layouts
from tests.models import build, loaders
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.checkpoint.saves import SaveAt, content
from tests.strategies.one_and_two import made, require_like
from tests.trainers import trainer

ONE, EP2 = "lightning", ExpertParallel(2)
ALONE = {ONE: Layout(1, 1, None), "none": Layout(1, 1, HybridStrategy)}
ROWS: dict[str, dict[str, Layout]] = {
    "plain": ALONE
    | layouts("zero 1", "zero 2, offloaded")
    | {
        "zero 3, offloaded": Layout(2, 2, partial(ZeroStrategy, 2, offload=True)),
        "hsdp": Layout(4, 4, partial(ZeroStrategy, 2, replicate=2)),
    },
    "gpt2": ALONE
    | layouts("zero 3", "tensor x zero 2", "context x zero 3", "pipeline x tensor", "zbv", "pipeline x zero 3")
    | {"context x tensor": Layout(4, 1, hybrid(ContextParallel(2), TP2))},
    "mixtral": ALONE
    | layouts("zero 2", "expert x zero 3", "expert x tensor")
    | {
        "ep 4": Layout(4, 4, partial(ExpertParallelStrategy, 4)),
        "ep 4, copies": Layout(4, 4, hybrid(Zero(2, replicate=2), ExpertParallel(4))),
        "ep 2, pp 2": Layout(4, 2, hybrid(DataParallel(2), PP2, EP2)),
        "ep 2, cp 2": Layout(2, 1, hybrid(Zero(1), ContextParallel(2), EP2)),
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"blocks": 1},
    "gpt2": {"n_layer": 4},  # tied embeddings, fused queries, keys and values
    "mixtral": {"num_hidden_layers": 2, "experts_implementation": "eager"},
}
STOP = 6  # within the second epoch of four batches
RUN = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "limit_val_batches": 0,
       "precision": "64-true"}  # fmt: skip


class SaveFirst(Callback):
    """Saves what was read, before anything is trained."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, _: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def fitted(column: str, row: str, form: str, saver: Callback, resume: Path | None = None) -> Curve:
    """Losses and weights, which a model that started from other weights would not have."""
    _, readers, strategy = ROWS[column][row]
    recorder, model = Recorder(), build(column, seed=0 if resume is None else 5, **MODELS[column])
    fit = trainer(made(strategy and partial(strategy, checkpoint=form)), callbacks=[recorder, saver], **RUN)
    fit.fit(model, *loaders(column, 8 // readers, samples=32), ckpt_path=resume, weights_only=True)
    recorder.curve.weights.update({name: whole(name, value) for name, value in model.state_dict().items()})
    return recorder.curve


def check(column: str, form: str, pairs: list[tuple[str, str]], folder: Path) -> None:
    """Each pair: who writes, who reads."""
    rows, one = ROWS[column], begun_on_one(fitted, column, ONE, form, SaveAt(folder / "one", [STOP]))
    for writer in dict.fromkeys(writer for writer, _ in pairs):
        run_on_ranks(rows[writer].ranks, fitted, column, writer, form, SaveAt(folder / writer, [STOP]))
    wanted, states = one.result(), content(folder / "one" / f"{STOP}.ckpt")
    for writer, reader in pairs:
        file, copy, where = folder / writer / f"{STOP}.ckpt", folder / f"{reader}.ckpt", f"{reader} of {writer}"
        found = run_on_ranks(rows[reader].ranks, fitted, column, reader, form, SaveFirst(copy), file)[0]
        written, read = content(file), content(copy)
        assert written.keys() - states.keys() <= {RANDOMNESS, POSITIONS}, where
        for part in ("state_dict", "optimizer_states", "lr_schedulers"):
            require_like(written[part], read[part], rtol=0, atol=0, where=f"{where}: {part}")
            require_like(states[part], written[part], rtol=1e-4, where=f"{writer}: {part}")
        if ONE not in (writer, reader):  # whose file does not tell the order of a shuffled epoch
            assert found.losses == pytest.approx(wanted.losses[STOP:], rel=1e-6), where
            compare_weights(wanted.weights, found.weights, 1e-5, where)
        if form == "sharded":
            assert elements(file, rows[writer].ranks) == pytest.approx(elements(copy, rows[reader].ranks), abs=40_960)


def elements(path: Path, ranks: int) -> int:
    """How many bytes a folder holds, of tensors and random states, whose files all ranks wrote."""
    manifest = read_manifest(path)
    files = [TensorsFile(path / name) for name in manifest.files if name.startswith("rank")]
    assert len(files) == ranks
    assert sorted(file.suffix for file in path.iterdir()) == [".json"] * 2 + [".safetensors"] * ranks
    return sum(entry.stop - entry.start for file in files for entry in file.entries.values())


@pytest.mark.parametrize(
    ("column", "form", "pairs"),
    [
        ("plain", "full", [(ONE, "zero 3, offloaded"), ("hsdp", "none")]),
        ("gpt2", "sharded", [("pipeline x tensor", "zero 3")]),
    ],
    ids=["full", "sharded"],
)
def test_layouts_go_on_from_each_other(column: str, form: str, pairs: list[Any], tmp_path: Path) -> None:
    check(column, form, pairs, tmp_path)
    if column == "gpt2":
        tied = read_manifest(tmp_path / "pipeline x tensor" / f"{STOP}.ckpt").same
        assert tied == {"state_dict/network.lm_head.weight": "state_dict/network.transformer.wte.weight"}


WRITERS = [(column, row, ("full", "sharded")[k % 2]) for column in ROWS for k, row in enumerate(ROWS[column])]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("column", "writer", "form"), WRITERS)
def test_all_layouts_read_what_one_wrote(column: str, writer: str, form: str, tmp_path: Path) -> None:
    check(column, form, [(writer, reader) for reader in ROWS[column] if reader != ONE], tmp_path)


def changed_by_a_hook(path: Path) -> None:
    """Fused weights of GPT-2 are lists of elements on each rank, which DTensor would take for plain rows."""
    model = build("gpt2", n_layer=2)

    def add(checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: value + 1 for name, value in checkpoint["state_dict"].items()}

    vars(model)["on_save_checkpoint"] = add
    run = trainer(TensorParallelStrategy(2, checkpoint="sharded"), max_epochs=1, callbacks=[SaveAt(path.parent, [1])])
    run.fit(model, *loaders("gpt2", 8, samples=8, val_samples=8))
    saved = content(path)["state_dict"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value + 1, rtol=0, atol=0)


def with_copies_of_heads(path: Path) -> None:
    """Six heads of queries and three of keys and values: both ranks have the second of those."""
    heads = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2}
    found = []
    for seed, resume in ((0, None), (3, path)):
        model = build("llama", seed, **heads)
        savers = [] if resume else [SaveAt(path.parent, [1])]
        run = trainer(TensorParallelStrategy(2, checkpoint="sharded"), max_epochs=2, callbacks=savers)
        run.fit(model, *loaders("llama", 8, samples=16, val_samples=8), ckpt_path=resume)
        found.append(model.state_dict())
    require_like(*found, rtol=0, atol=0)


def test_fused_and_copied_weights_are_written_once(tmp_path: Path) -> None:
    run_on_ranks(2, changed_by_a_hook, tmp_path / "fused" / "1.ckpt")
    run_on_ranks(2, with_copies_of_heads, tmp_path / "copied" / "1.ckpt")
