"""A save that fails fails on all ranks and leaves what was there; a run goes on from the newest valid checkpoint."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_parallel.checkpoint import folder
from lightning_parallel.checkpoint.damage import Damaged
from lightning_parallel.checkpoint.manifest import read_manifest
from lightning_parallel.strategies.checkpoint.files import AtomicCheckpointIO
from tests.ranks import run_on_ranks
from tests.strategies.test_checkpoint_use import LAYOUTS, Tied, fitted, tokens
from tests.tiers import covering

SHARDED = {name: partial(make, checkpoint="sharded") for name, make in LAYOUTS.items()}
FORMS = ("full", "sharded")


class Keeping(ModelCheckpoint):
    """Counts the valid checkpoints after every batch: from the first on there is always one."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, "{step}", **options)
        self.fewest: list[int] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(*args, **kwargs)
        here = Path(str(self.dirpath))
        self.fewest.append(len(valid_in(here)) or len(valid_in(here)))  # one that was listed may be removed


def valid_in(where: Path) -> set[str]:
    found = set()
    for path in [path for path in where.iterdir() if not path.name.startswith(".")] if where.exists() else []:
        try:
            if path.is_dir():
                folder.require_whole(path, folder.faults(path, read_manifest(path)))
            else:
                AtomicCheckpointIO().load_checkpoint(path)
        except (OSError, Damaged):
            assert not path.exists(), path  # it is being removed
            continue
        found.add(path.name)
    return found


def kept_by_model_checkpoint(make: Callable[[], Any], path: Path) -> None:
    """`save_top_k`, `every_n_train_steps`, `save_last` and `monitor`, as users have them."""
    often = Keeping(path.parent / "often", every_n_train_steps=1, save_top_k=1)
    best = ModelCheckpoint(path.parent / "best", "{step}", monitor="val_loss", save_top_k=2, save_last=True, mode="max")
    link = ModelCheckpoint(path.parent / "link", "{step}", every_n_epochs=1, save_top_k=-1, save_last="link")
    run = fitted(make, Tied(), max_epochs=3, callbacks=[best, often, link], enable_checkpointing=True)
    steps = run.global_step
    assert min(often.fewest[1:]) >= 1
    assert valid_in(path.parent / "often") == {f"step={steps}.ckpt"}
    assert len(valid_in(path.parent / "best")) == 3
    assert valid_in(path.parent / "link") == {*(f"step={steps * n // 3}.ckpt" for n in (1, 2, 3)), "last.ckpt"}
    (result,) = run.test(Tied(), tokens(), ckpt_path="best", verbose=False)
    assert result["test_loss"] == pytest.approx(best.best_model_score.item(), rel=1e-5)
    (result,) = run.validate(Tied(), tokens(), ckpt_path="last", verbose=False)
    assert result["val_loss"] < best.best_model_score


@covering(keep=4, form=FORMS, layout=LAYOUTS, async_save=(False, True))
def test_model_checkpoint(form: str, layout: str, async_save: bool, tmp_path: Path) -> None:
    make = partial(LAYOUTS[layout], checkpoint=form, async_save=async_save)
    run_on_ranks(2, kept_by_model_checkpoint, make, tmp_path / "file.ckpt")
