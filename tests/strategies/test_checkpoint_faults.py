"""A save that fails fails on all ranks and leaves what was there; a run goes on from the newest valid checkpoint."""

import errno
import logging
import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_parallel import HybridStrategy, ZeroStrategy
from lightning_parallel.checkpoint import commit, folder
from lightning_parallel.checkpoint.damage import Damaged
from lightning_parallel.checkpoint.manifest import read_manifest
from lightning_parallel.strategies import refusals
from lightning_parallel.strategies.checkpoint.reading import AtomicCheckpointIO
from tests.ranks import run_on_ranks
from tests.strategies.test_checkpoint_use import LAYOUTS, SaveHalfway, Tied, fitted, tokens
from tests.tiers import covering, sampled
from tests.trainers import trainer

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
    dist.barrier()  # rank 0 alone removes the link to the last one and makes it anew
    assert min(often.fewest[1:]) >= 1
    assert valid_in(path.parent / "often") == {f"step={steps}.ckpt"}
    assert len(valid_in(path.parent / "best")) == 3
    assert valid_in(path.parent / "link") == {*(f"step={steps * n // 3}.ckpt" for n in (1, 2, 3)), "last.ckpt"}
    (result,) = run.test(Tied(), tokens(), ckpt_path="best", verbose=False)
    assert result["test_loss"] == pytest.approx(best.best_model_score.item(), rel=1e-5)
    (result,) = run.validate(Tied(), tokens(), ckpt_path="last", verbose=False)
    assert result["val_loss"] < best.best_model_score


@covering(keep=1, form=FORMS, layout=LAYOUTS, async_save=(False, True))
def test_model_checkpoint(form: str, layout: str, async_save: bool, tmp_path: Path) -> None:
    make = partial(LAYOUTS[layout], checkpoint=form, async_save=async_save)
    run_on_ranks(2, kept_by_model_checkpoint, make, tmp_path / "file.ckpt")


# ---------------------------------------------------------------- failures while saving


def full_disk(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def fails_everywhere(path: Path, rank: int, what: str) -> None:
    """One rank cannot write: all raise, naming it, and what was there stays."""
    model = Tied()
    run = fitted(partial(ZeroStrategy, 2, stage=3, checkpoint="sharded"), model)
    run.save_checkpoint(path)
    before = load_model(path)
    model.table.weight.data.zero_()
    broken = (folder, "write_share") if what == "write its part" else (commit, "commit")
    with pytest.MonkeyPatch.context() as patch:
        if run.global_rank == rank:
            patch.setattr(*broken, full_disk)
        error = OSError if run.global_rank == rank else RuntimeError
        with pytest.raises(
            error, match="No space left" if error is OSError else f"rank {rank} could not {what}.*No space"
        ):
            run.save_checkpoint(path)
    run.strategy.barrier()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert all(torch.equal(value, before[name]) for name, value in load_model(path).items())


def load_model(path: Path) -> dict[str, torch.Tensor]:
    return folder.read(path, read_manifest(path), lambda name: False)["state_dict"]


@sampled(2, ("rank", "what"), [(0, "write its part"), (1, "write its part"), (0, "commit")])
def test_a_save_that_fails_on_one_rank_fails_on_all(rank: int, what: str, tmp_path: Path) -> None:
    run_on_ranks(2, fails_everywhere, tmp_path / "file.ckpt", rank, what, timeout=10.0)


class FailOnce(Callback):
    """The disk is full for one save in the background, which is begun in the first batch."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank, self.begun = path, rank, 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun += 1

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.begun == 1:
            with pytest.MonkeyPatch.context() as patch:
                if trainer.global_rank == self.rank:
                    patch.setattr(folder, "write_share", full_disk)
                    patch.setattr(AtomicCheckpointIO, "save_checkpoint", full_disk)
                trainer.save_checkpoint(self.path)
                while not trainer.strategy._saves().failed:
                    time.sleep(0.01)


def surfaces(path: Path, form: str, rank: int, size: int) -> None:
    failing = FailOnce(path, rank)
    make = partial(HybridStrategy) if size == 1 else partial(ZeroStrategy, 2)
    told = "No space left" if int(os.environ["RANK"]) == rank else f"rank {rank} could not write .*No space left"
    with pytest.raises((OSError, RuntimeError), match=told):
        fitted(partial(make, checkpoint=form, async_save=True), Tied(), callbacks=[failing])
    assert failing.begun <= 2
    assert not list(path.parent.iterdir())


@covering(form=FORMS, size=(1, 2))
def test_a_save_in_the_background_that_fails_is_told_before_the_next_step(form: str, size: int, tmp_path: Path) -> None:
    rank = 1 if (form, size) == ("sharded", 2) else 0
    run_on_ranks(size, surfaces, tmp_path / "file.ckpt", form, rank, size, timeout=10.0)


class Unplain(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.hparams["activation"] = torch.nn.ReLU()


def refuses_what_is_not_plain(path: Path) -> None:
    remedy = (
        r"checkpoint\['hyper_parameters'\]\['activation'\] is a .*ReLU.*save_hyperparameters\(ignore=\['activation'\]\)"
    )
    with pytest.raises(TypeError, match=remedy):
        fitted(partial(HybridStrategy, checkpoint="sharded"), Unplain()).save_checkpoint(path)
    assert not list(path.parent.iterdir())


def test_what_only_code_could_bring_back_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    run_on_ranks(1, refuses_what_is_not_plain, tmp_path / "file.ckpt")


# ---------------------------------------------------------------- code


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def runs_no_code(path: Path) -> None:
    run = fitted(HybridStrategy, Tied())
    run.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    canary = path.parent / "canary"
    torch.save({**checkpoint, "note": Payload(canary)}, path)

    def validate(weights_only: bool | None = None, **options: Any) -> None:
        trainer(HybridStrategy(**options)).validate(
            Tied(), tokens(), ckpt_path=path, weights_only=weights_only, verbose=False
        )

    for given in (None, True):
        with pytest.raises(ValueError, match=r"holds what only code could bring back .*trust_checkpoint_code=True"):
            validate(given)
    with pytest.raises(ValueError, match="weights_only=False would let the checkpoint run any code"):
        validate(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        with pytest.raises(ValueError, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set"):
            validate()
    assert not canary.exists()
    validate(trust_checkpoint_code=True)
    assert canary.exists()


def test_no_code_runs_unless_the_user_trusts_it(tmp_path: Path) -> None:
    run_on_ranks(1, runs_no_code, tmp_path / "file.ckpt")


# ---------------------------------------------------------------- going on by itself


def goes_on(where: Path, form: str, expected: int | str, said: str = "") -> int:
    """Fits with `resume="auto"` and tells how many steps it took in all."""
    often = ModelCheckpoint(where, "{step}", every_n_train_steps=1, save_top_k=-1)
    made = partial(HybridStrategy, checkpoint=form, resume="auto")
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            fitted(made, Tied(), callbacks=[often], enable_checkpointing=True)
        return 0
    with LogOf("lightning_parallel.strategies.checkpoint.reading") as log:
        run = fitted(made, Tied(), max_epochs=expected, callbacks=[often], enable_checkpointing=True)
    assert said in log.text, log.text
    return run.global_step


class LogOf(logging.Handler):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.logger, self.text = logging.getLogger(name), ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()

    def __enter__(self) -> "LogOf":
        self.logger.addHandler(self)
        self.logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self)


def auto(where: Path, form: str) -> None:
    """An epoch has four steps; then one more, after the newest checkpoint was damaged, and then all."""
    assert goes_on(where, form, 1, "There is no checkpoint in") == 4
    fitted(partial(HybridStrategy, checkpoint=form), Tied()).save_checkpoint(where / "weights.ckpt", weights_only=True)
    damage(where / "step=4.ckpt")
    assert goes_on(where, form, 2, "step=3.ckpt, step 3. Skipped: ") == 8
    for path in where.glob("step=*"):
        damage(path)
    goes_on(where, form, "none from which this run can go on.*another.*pass resume=None to start from the beginning")


def damage(path: Path) -> None:
    file = max(path.glob("rank*")) if path.is_dir() else path
    data = bytearray(file.read_bytes())
    data[len(data) // 2] = (data[len(data) // 2] + 1) % 256
    file.write_bytes(data)


@pytest.mark.parametrize("form", FORMS)
def test_a_run_goes_on_by_itself_from_the_newest_valid_checkpoint(form: str, tmp_path: Path) -> None:
    run_on_ranks(1, auto, tmp_path / "run", form)


def goes_on_from_one_without_a_name(where: Path) -> None:
    """It was whole when its process was killed, and had not its name yet; the next save sweeps such names away."""
    assert goes_on(where, "sharded", 1) == 4
    (where / "step=4.ckpt").rename(commit.temporary_name(where / "step=4.ckpt", commit.UNFINISHED))
    assert goes_on(where, "sharded", 2, f"Going on from {where / 'step=4.ckpt'}, step 4.") == 8
    assert valid_in(where) == {f"step={step}.ckpt" for step in range(1, 9)}


def test_a_run_goes_on_from_a_checkpoint_that_lacked_its_name_only(tmp_path: Path) -> None:
    run_on_ranks(1, goes_on_from_one_without_a_name, tmp_path / "run")


def both_ranks_go_on(where: Path) -> None:
    made = partial(ZeroStrategy, 2, checkpoint="sharded", resume="auto")
    saved = [SaveHalfway(where / "half.ckpt"), ModelCheckpoint(where, save_top_k=0)]
    fitted(made, Tied(), callbacks=saved, enable_checkpointing=True)
    again = fitted(made, Tied(), callbacks=saved, enable_checkpointing=True)
    assert str(again.ckpt_path) == str(where / "half.ckpt")


def test_ranks_go_on_from_the_same_one(tmp_path: Path) -> None:
    run_on_ranks(2, both_ranks_go_on, tmp_path)


def goes_on_in_the_next_version(where: Path) -> None:
    """A logger counts its runs, and each has a folder of its own."""
    warnings.filterwarnings("ignore", "The dirpath has changed")
    for epochs in (1, 2):
        saver, logger = ModelCheckpoint(), CSVLogger(where)
        options = {"callbacks": [saver], "logger": logger, "enable_checkpointing": True, "max_epochs": epochs}
        run = fitted(partial(HybridStrategy, resume="auto"), Tied(), **options)
    assert run.global_step == 8
    assert "version_0" in str(run.ckpt_path)


def test_a_run_goes_on_from_another_version_of_its_logger(tmp_path: Path) -> None:
    run_on_ranks(1, goes_on_in_the_next_version, tmp_path)


def nobody_saves() -> None:
    with pytest.raises(ValueError, match="resume='auto' looks where a ModelCheckpoint saves, and the trainer has none"):
        fitted(partial(HybridStrategy, resume="auto"), Tied())


def test_without_a_folder_there_is_nothing_to_go_on_from() -> None:
    run_on_ranks(1, nobody_saves)


def test_arguments_are_checked() -> None:
    for wrong in ({"checkpoint": "shards"}, {"async_save": "yes"}, {"resume": True}, {"trust_checkpoint_code": 1}):
        with pytest.raises(ValueError, match=f"strategy\\({next(iter(wrong))}="):
            ZeroStrategy(2, **wrong)
    with pytest.raises(ValueError, match="AtomicCheckpointIO writes what one has; leave out the checkpoint_io"):
        trainer(ZeroStrategy(1, checkpoint="sharded", checkpoint_io=AtomicCheckpointIO()), devices=1)


# ---------------------------------------------------------------- another number of ranks


def saved_within_an_epoch(path: Path) -> None:
    fitted(partial(HybridStrategy, checkpoint="sharded"), Tied(), callbacks=[SaveHalfway(path)])


def goes_on_with_other_batches(path: Path) -> None:
    remedy = r"global batches of 4, and now one has 8 \(2 ranks read different samples\).*use 2 per rank in place of 4"
    with pytest.raises(ValueError, match=remedy):
        trainer(ZeroStrategy(2), max_epochs=1).fit(Tied(), tokens(), tokens(), ckpt_path=path)


def test_a_global_batch_that_would_change_within_an_epoch_is_refused(tmp_path: Path) -> None:
    run_on_ranks(1, saved_within_an_epoch, tmp_path / "half.ckpt")
    run_on_ranks(2, goes_on_with_other_batches, tmp_path / "half.ckpt")


def cannot_be_written(folder: Path, form: str) -> None:
    saver = ModelCheckpoint(folder / "run")
    said = "ModelCheckpoint would save checkpoints in .*, and nobody can write to .*: .*; pass it another dirpath"
    with pytest.raises((ValueError, RuntimeError), match=said):
        fitted(partial(ZeroStrategy, 2, checkpoint=form), Tied(), callbacks=[saver], enable_checkpointing=True)


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_that_nobody_can_write_to_is_refused_before_the_run(form: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run_on_ranks(2, cannot_be_written, Path("/proc/self") if form == "full" else tmp_path / "file", form)


def no_room(form: str) -> None:
    make = partial(ZeroStrategy, 2, checkpoint=form)
    saver = ModelCheckpoint(os.environ["RANKS_SCRATCH"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refusals, "memory_of_host", lambda: 100)
        fitted(make, Tied())  # nobody saves
        if form == "sharded":
            fitted(make, Tied(), callbacks=[saver], enable_checkpointing=True)
            return
        with pytest.raises(ValueError, match=r"would gather 216 bytes .* its host has 100; pass checkpoint='sharded'"):
            fitted(make, Tied(), callbacks=[saver], enable_checkpointing=True)


@sampled(1, "form", FORMS)
def test_a_full_checkpoint_for_which_there_is_no_memory_is_refused_before_the_run(form: str) -> None:
    run_on_ranks(2, no_room, form)
