"""What any layout wrote, any other reads, bit for bit, and trains on: experts and divided sequences among them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_parallel import (
    ContextParallel,
    ContextParallelStrategy,
    DataParallel,
    ExpertParallel,
    ExpertParallelStrategy,
    HybridStrategy,
    PipelineParallel,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from tests.checkpoint.folders import load
from tests.curves import Recorder
from tests.models import build, loaders
from tests.ranks import run_on_ranks
from tests.strategies.test_checkpoints import SaveAt
from tests.tiers import sampled
from tests.trainers import trainer


def hybrid(*techniques: Any) -> Callable[..., Strategy]:
    return partial(HybridStrategy, *techniques)


PP2 = PipelineParallel(2, microbatches=2)
EP2 = ExpertParallel(2)
Rows = dict[str, tuple[int, int, Callable[..., Strategy]]]
ROWS: dict[str, Rows] = {
    "mixtral": {
        "none": (1, 1, HybridStrategy),
        "zero 2": (2, 2, partial(ZeroStrategy, 2, stage=2)),
        "ep 2": (2, 2, partial(ExpertParallelStrategy, 2)),
        "ep 4": (4, 4, partial(ExpertParallelStrategy, 4)),
        "ep 2, zero 1": (4, 4, hybrid(Zero(4, stage=1), EP2)),
        "ep 2, zero 3": (4, 4, hybrid(Zero(4), EP2)),
        "ep 4, copies": (4, 4, hybrid(Zero(2, replicate=2), ExpertParallel(4))),
        "ep 2, tp 2": (4, 2, hybrid(DataParallel(2), TensorParallel(2), EP2)),
        "ep 2, pp 2": (4, 2, hybrid(DataParallel(2), PP2, EP2)),
        "ep 2, cp 2": (2, 1, hybrid(Zero(1), ContextParallel(2), EP2)),
    },
    "gpt2": {
        "none": (1, 1, HybridStrategy),
        "zero 3": (2, 2, partial(ZeroStrategy, 2)),
        "tp 2": (2, 1, partial(TensorParallelStrategy, 2)),
        "cp 2": (2, 1, partial(ContextParallelStrategy, 2)),
        "cp 2, zero 3": (4, 2, hybrid(Zero(2), ContextParallel(2))),
        "cp 2, tp 2": (4, 1, hybrid(ContextParallel(2), TensorParallel(2))),
        "cp 2, pp 2": (4, 1, hybrid(ContextParallel(2), PP2)),
        "pp 2": (2, 1, hybrid(PP2)),
        "zbv": (2, 1, hybrid(PipelineParallel(2, schedule="zbv", microbatches=4))),
        "pp 2, zero 3": (4, 2, hybrid(PP2, Zero(2))),
    },
}
MODELS = {"mixtral": {"num_hidden_layers": 2, "experts_implementation": "eager"}, "gpt2": {"n_layer": 4}}
STOP = 1


class SaveFirst(Callback):
    """Saves what was read, before anything is trained."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, _: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def fitted(column: str, row: str, form: str, callbacks: list[Any], resume: Path | None = None) -> list[float]:
    """The losses, which a model that started from other weights would not have."""
    _, readers, strategy = ROWS[column][row]
    recorder = Recorder()
    model = build(column, seed=0 if resume is None else 5, **MODELS[column])
    run = trainer(
        strategy(checkpoint=form),
        callbacks=[recorder, *callbacks],
        max_epochs=1,
        precision="64-true",
        limit_val_batches=0,
    )
    run.fit(model, *loaders(column, 8 // readers), ckpt_path=resume, weights_only=True)
    return recorder.curve.losses


def written_by(column: str, row: str, form: str, folder: Path) -> list[float]:
    return fitted(column, row, form, [SaveAt(folder / row, [STOP])])


def read_by(column: str, row: str, form: str, file: Path, copy: Path) -> list[float]:
    return fitted(column, row, form, [SaveFirst(copy)], file)


def content(path: Path) -> dict[str, Any]:
    return load(path) if path.is_dir() else torch.load(path, weights_only=True)


def require_same(expected: Any, found: Any, where: str) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(expected, found), where
    elif isinstance(expected, dict):
        assert expected.keys() == found.keys(), where
        for key, value in expected.items():
            require_same(value, found[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(found), where
        for number, value in enumerate(expected):
            require_same(value, found[number], f"{where}[{number}]")
    else:
        assert expected == found, where


def check(column: str, form: str, pairs: list[tuple[str, str]], folder: Path) -> None:
    """Each pair: who writes, who reads."""
    rows, curves = ROWS[column], {}
    for row in dict.fromkeys(writer for writer, _ in pairs):
        curves[row] = run_on_ranks(rows[row][0], written_by, column, row, form, folder)[0]
    for writer, reader in pairs:
        file, copy, where = (
            folder / writer / f"{STOP}.ckpt",
            folder / f"{reader} of {writer}.ckpt",
            f"{reader} of {writer}",
        )
        losses = run_on_ranks(rows[reader][0], read_by, column, reader, form, file, copy)[0]
        expected, found = content(file), content(copy)
        for part in ("state_dict", "optimizer_states", "lr_schedulers"):
            require_same(expected[part], found[part], f"{where}: {part}")
        assert losses == pytest.approx(curves[writer][STOP:], rel=1e-6), where


@pytest.mark.exhaustive
@sampled(1, "form", ["sharded", "full"])
def test_experts_divided_in_other_ways(form: str, tmp_path: Path) -> None:
    check("mixtral", form, [("ep 2", "ep 4"), ("ep 2", "none")], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["sharded", "full"])
@pytest.mark.parametrize(("column", "writer"), [(column, row) for column, rows in ROWS.items() for row in rows])
def test_all_layouts_read_what_all_wrote(column: str, writer: str, form: str, tmp_path: Path) -> None:
    check(column, form, [(writer, reader) for reader in ROWS[column]], tmp_path)
