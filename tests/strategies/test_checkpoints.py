"""A checkpoint is one plain Lightning file, whoever wrote it, and training goes on as if it had never stopped."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import Strategy

from lightning_parallel.strategies.checkpoint.resumption import FINDINGS, POSITIONS, RANDOMNESS
from lightning_parallel.strategies.named import DataParallelStrategy, HybridStrategy, ZeroStrategy
from tests.curves import Curve, Recorder, compare_weights
from tests.models import build, loaders
from tests.ranks import run_on_ranks
from tests.trainers import trainer

MakeStrategy = Callable[[], Strategy]
ROWS: dict[str, tuple[int, MakeStrategy | str]] = {
    "lightning": (1, "auto"),
    "none": (1, HybridStrategy),
    "dp_2": (2, partial(DataParallelStrategy, 2)),
    "dp_4": (4, partial(DataParallelStrategy, 4)),
    "zero_1": (2, partial(ZeroStrategy, 2, stage=1)),
    "zero_2": (2, partial(ZeroStrategy, 2, stage=2)),
    "zero_3": (2, partial(ZeroStrategy, 2, stage=3)),
    "zero_3_on_4": (4, partial(ZeroStrategy, 4, stage=3)),
    "hsdp": (4, partial(ZeroStrategy, 2, replicate=2)),
    "offload_1": (2, partial(ZeroStrategy, 2, stage=1, offload=True)),
    "offload_3": (2, partial(ZeroStrategy, 2, stage=3, offload=True)),
}
BY_DEFAULT = ("lightning", "zero_1", "hsdp", "offload_3")
RUN = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "num_sanity_val_steps": 0}


class SaveAt(Callback):
    """Saves after a batch, wherever in an epoch that is."""

    def __init__(self, folder: Path, batches: list[int]) -> None:
        self.folder, self.batches, self.done = folder, batches, 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.done += 1
        if self.done in self.batches:
            trainer.save_checkpoint(self.folder / f"{self.done}.ckpt")


def fitted(row: str, *, seed: int = 0, resume: Path | None = None, save: SaveAt | None = None) -> Curve:
    n, strategy = ROWS[row]
    if row == "lightning":  # it warns wherever a process group exists, even of one rank
        warnings.filterwarnings("ignore", ".*sync_dist=True")
    recorder = Recorder()
    model = build("plain", seed=seed, blocks=1)
    run = trainer(
        strategy if isinstance(strategy, str) else strategy(), callbacks=[recorder, *filter(None, [save])], **RUN
    )
    run.fit(model, *loaders("plain", 8 // n, samples=32, val_samples=8), ckpt_path=resume, weights_only=True)
    recorder.curve.weights.update({name: value.detach().clone() for name, value in model.state_dict().items()})
    return recorder.curve


def fit_rows(rows: list[str], folder: Path) -> dict[str, Curve]:
    return {row: fitted(row, save=SaveAt(folder / row, [4, 6])) for row in rows}


def resume_rows(pairs: list[tuple[str, str]], folder: Path) -> dict[tuple[str, str], Curve]:
    return {(row, file): fitted(row, seed=5, resume=folder / file) for row, file in pairs}


@pytest.fixture(scope="module", params=[BY_DEFAULT, pytest.param(tuple(ROWS), marks=pytest.mark.exhaustive)], ids=len)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Curve]]:
    """The files of some rows, after an epoch of 4 batches and within the next, and the curves to their ends."""
    folder = tmp_path_factory.mktemp("checkpoints")
    curves: dict[str, Curve] = {}
    for n in (1, 2, 4):
        rows = [row for row in request.param if ROWS[row][0] == n]
        curves |= run_on_ranks(n, fit_rows, rows, folder)[0]
    return folder, curves


def test_all_rows_write_the_same_file(written: tuple[Path, dict[str, Curve]]) -> None:
    folder, curves = written
    expected = torch.load(folder / "lightning" / "4.ckpt", weights_only=True)
    for row in curves:
        got = torch.load(folder / row / "4.ckpt", weights_only=True)
        assert got.keys() - expected.keys() <= {RANDOMNESS, POSITIONS, FINDINGS}, row
        compare_weights(expected["state_dict"], got["state_dict"], 1e-4, f"{row}: ")
        (wanted,), (found,) = expected["optimizer_states"], got["optimizer_states"]
        assert wanted["param_groups"] == found["param_groups"], row
        assert wanted["state"].keys() == found["state"].keys(), row
        for index, state in wanted["state"].items():
            compare_weights(state, found["state"][index], 1e-4, f"{row}: state {index}: ")
        assert curves[row].losses == pytest.approx(curves["lightning"].losses, rel=1e-5), row


def check_resumed(pairs: list[tuple[str, str]], written: tuple[Path, dict[str, Curve]], after: int) -> None:
    folder, curves = written
    for n in (1, 2, 4):
        mine = [(row, file) for row, file in pairs if ROWS[row][0] == n]
        for (row, file), got in (run_on_ranks(n, resume_rows, mine, folder)[0] if mine else {}).items():
            where = f"{row} from {file}: "
            assert got.losses == pytest.approx(curves["lightning"].losses[after:], rel=1e-5), where
            compare_weights(curves["lightning"].weights, got.weights, 1e-4, where)


def test_every_row_goes_on_from_lightnings_own_file(written: tuple[Path, dict[str, Curve]]) -> None:
    check_resumed([(row, "lightning/4.ckpt") for row in written[1]], written, after=4)


def test_lightning_goes_on_from_every_row(written: tuple[Path, dict[str, Curve]]) -> None:
    check_resumed([("lightning", f"{row}/4.ckpt") for row in written[1]], written, after=4)


def test_rows_go_on_from_each_other_within_an_epoch(written: tuple[Path, dict[str, Curve]]) -> None:
    rows = [row for row in written[1] if row != "lightning"]
    pairs = [(row, f"{rows[(number + len(rows) // 2) % len(rows)]}/6.ckpt") for number, row in enumerate(rows)]
    check_resumed(pairs, written, after=6)
