"""A sharded checkpoint is read on any layout, and training goes on as if it had never stopped."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy

from lightning_parallel import (
    DataParallelStrategy,
    HybridStrategy,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from lightning_parallel.checkpoint.manifest import read_manifest
from lightning_parallel.checkpoint.stored import in_memory
from lightning_parallel.checkpoint.tensors_file import TensorsFile
from lightning_parallel.strategies.checkpoint.reading import AtomicCheckpointIO, CheckpointOptions, load
from tests.curves import Curve, Recorder, compare_weights
from tests.models import build, loaders
from tests.ranks import run_on_ranks
from tests.strategies.test_checkpoints import SaveAt
from tests.trainers import trainer

ROWS: dict[str, tuple[int, int, Callable[..., Strategy]]] = {
    "none": (1, 1, HybridStrategy),
    "dp_2": (2, 2, partial(DataParallelStrategy, 2)),
    "zero_2": (2, 2, partial(ZeroStrategy, 2, stage=2)),
    "zero_3": (2, 2, partial(ZeroStrategy, 2, stage=3)),
    "tp_2": (2, 1, partial(TensorParallelStrategy, 2)),
    "pp_2": (2, 1, partial(PipelineParallelStrategy, 2)),
    "tp_2_zero_2": (4, 2, partial(HybridStrategy, TensorParallel(2), Zero(2, stage=2))),
    "pp_2_tp_2": (4, 1, partial(HybridStrategy, PipelineParallel(2), TensorParallel(2))),
}
BY_DEFAULT = ("none", "zero_3", "pp_2", "pp_2_tp_2")
RUN = {"max_epochs": 2, "gradient_clip_val": 0.5, "num_sanity_val_steps": 0}
STOP = 4  # within an epoch of three batches


def fitted(row: str, *, seed: int = 0, resume: Path | None = None, save: SaveAt | None = None) -> Curve:
    _, readers, strategy = ROWS[row]
    recorder = Recorder()
    model = build("gpt2", seed=seed, n_layer=2)  # tied embeddings, fused queries, keys and values
    callbacks = [recorder, *filter(None, [save])]
    run = trainer(strategy(checkpoint="sharded"), callbacks=callbacks, **RUN)
    run.fit(model, *loaders("gpt2", 8 // readers, samples=24, val_samples=8), ckpt_path=resume)
    recorder.curve.weights.update({name: value.detach().clone() for name, value in model.state_dict().items()})
    return recorder.curve


def fit_rows(rows: list[str], folder: Path) -> dict[str, Curve]:
    return {row: fitted(row, save=SaveAt(folder / row, [STOP])) for row in rows}


def resume_rows(pairs: list[tuple[str, str]], folder: Path) -> dict[tuple[str, str], Curve]:
    return {(row, other): fitted(row, seed=5, resume=folder / other / f"{STOP}.ckpt") for row, other in pairs}


@pytest.fixture(scope="module", params=[BY_DEFAULT, pytest.param(tuple(ROWS), marks=pytest.mark.exhaustive)], ids=len)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Curve]]:
    folder = tmp_path_factory.mktemp("sharded")
    curves: dict[str, Curve] = {}
    for n in (1, 2, 4):
        curves |= run_on_ranks(n, fit_rows, [row for row in request.param if ROWS[row][0] == n], folder, limit=120)[0]
    return folder, curves


def check_resumed(pairs: list[tuple[str, str]], written: tuple[Path, dict[str, Curve]]) -> None:
    folder, curves = written
    for n in (1, 2, 4):
        mine = [(row, other) for row, other in pairs if ROWS[row][0] == n]
        limit = 60 + 20 * len(mine)
        for (row, other), got in (run_on_ranks(n, resume_rows, mine, folder, limit=limit)[0] if mine else {}).items():
            where = f"{row} from {other}: "
            assert got.losses == pytest.approx(curves["none"].losses[STOP:], rel=1e-5), where
            compare_weights(curves["none"].weights, got.weights, 1e-4, where)


def test_layouts_go_on_from_each_other(written: tuple[Path, dict[str, Curve]]) -> None:
    """Each of the default ones is in one pair."""
    pairs = [("zero_3", "pp_2_tp_2"), ("pp_2", "none")]
    assert sorted(row for pair in pairs for row in pair) == sorted(BY_DEFAULT)
    check_resumed(pairs, written)


@pytest.mark.exhaustive
def test_all_layouts_go_on_from_all(written: tuple[Path, dict[str, Curve]]) -> None:
    check_resumed([(row, other) for row in written[1] for other in written[1]], written)


def test_a_folder_holds_every_element_once(written: tuple[Path, dict[str, Curve]]) -> None:
    folder, curves = written
    sizes = {}
    for row in curves:
        n = ROWS[row][0]
        path = folder / row / f"{STOP}.ckpt"
        manifest = read_manifest(path)
        files = [TensorsFile(path / name) for name in manifest.files if name.startswith("rank")]
        assert len(files) == n, row  # all ranks write
        sizes[row] = sum(entry.stop - entry.start for file in files for entry in file.entries.values())
        assert manifest.same == {"state_dict/network.lm_head.weight": "state_dict/network.transformer.wte.weight"}
        assert sorted(file.suffix for file in path.iterdir()) == [".json"] * 2 + [".safetensors"] * n, row
    assert max(sizes.values()) - min(sizes.values()) < 4 * 10_240, sizes  # random states of up to four ranks


def changed_by_a_hook(path: Path) -> None:
    """Fused weights of GPT-2 are lists of elements on each rank, which DTensor would take for plain rows."""
    model = build("gpt2", n_layer=2)

    def add(checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: value + 1 for name, value in checkpoint["state_dict"].items()}

    vars(model)["on_save_checkpoint"] = add
    run = trainer(TensorParallelStrategy(2, checkpoint="sharded"), max_epochs=1, callbacks=[SaveAt(path.parent, [1])])
    run.fit(model, *loaders("gpt2", 8, samples=8, val_samples=8))
    saved = load(path, CheckpointOptions(), AtomicCheckpointIO(), None, None)["state_dict"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(in_memory(saved[name]), value + 1, rtol=0, atol=0)


def test_a_hook_changes_a_sharded_checkpoint_as_the_whole(tmp_path: Path) -> None:
    run_on_ranks(2, changed_by_a_hook, tmp_path / "1.ckpt")


def with_copies_of_heads(path: Path) -> None:
    """Six heads of queries and three of keys and values: both ranks have the second of those."""
    heads = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2}
    model = build("llama", **heads)
    run = trainer(TensorParallelStrategy(2, checkpoint="sharded"), max_epochs=2, callbacks=[SaveAt(path.parent, [1])])
    run.fit(model, *loaders("llama", 8, samples=16, val_samples=8))
    again = build("llama", seed=3, **heads)
    rest = trainer(TensorParallelStrategy(2, checkpoint="sharded"), max_epochs=2)
    rest.fit(again, *loaders("llama", 8, samples=16, val_samples=8), ckpt_path=path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_elements_of_which_ranks_have_copies_are_written_once(tmp_path: Path) -> None:
    run_on_ranks(2, with_copies_of_heads, tmp_path / "1.ckpt")
