"""A save that fails fails on all ranks and leaves what was there: on full, read-only and too small disks too.

The full disk is a small file system in memory, mounted for the test where that is permitted. Everywhere, files may not
become longer than some bytes (RLIMIT_FSIZE), which fails at the same calls with another number.
"""

import errno
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_parallel import HybridStrategy, ZeroStrategy
from lightning_parallel.checkpoint import commit, folder
from lightning_parallel.strategies import refusals
from lightning_parallel.strategies.checkpoint.reading import AtomicCheckpointIO
from tests.ranks import run_on_ranks
from tests.strategies.checkpoint.saves import FORMS, Tied, content, fitted, tokens, valid_in
from tests.strategies.one_and_two import require_like
from tests.tiers import sampled
from tests.trainers import trainer


class Keeping(ModelCheckpoint):
    """Counts the valid checkpoints after every batch: from the first on there is always one."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, "{step}", **options)
        self.fewest: list[int] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(*args, **kwargs)
        here = Path(str(self.dirpath))
        self.fewest.append(len(valid_in(here)) or len(valid_in(here)))  # one that was listed may be removed


def kept_by_model_checkpoint(make: Callable[[], Any], where: Path) -> None:
    """`save_top_k`, `every_n_train_steps`, `save_last` and `monitor`, as users have them."""
    often = Keeping(where / "often", every_n_train_steps=1, save_top_k=1)
    best = ModelCheckpoint(where / "best", "{step}", monitor="val_loss", save_top_k=2, save_last=True, mode="max")
    link = ModelCheckpoint(where / "link", "{step}", every_n_epochs=1, save_top_k=-1, save_last="link")
    run = fitted(make, Tied(), max_epochs=3, callbacks=[best, often, link], enable_checkpointing=True)
    steps = run.global_step
    dist.barrier()  # rank 0 alone removes the link to the last one and makes it anew
    assert min(often.fewest[1:]) >= 1
    assert valid_in(where / "often") == {f"step={steps}.ckpt"}
    assert len(valid_in(where / "best")) == 3
    assert valid_in(where / "link") == {*(f"step={steps * n // 3}.ckpt" for n in (1, 2, 3)), "last.ckpt"}
    (result,) = run.test(Tied(), tokens(), ckpt_path="best", verbose=False)
    assert result["test_loss"] == pytest.approx(best.best_model_score.item(), rel=1e-5)
    (result,) = run.validate(Tied(), tokens(), ckpt_path="last", verbose=False)
    assert result["val_loss"] < best.best_model_score


@sampled(1, ("form", "async_save"), [("sharded", True), ("full", False), ("full", True), ("sharded", False)])
def test_model_checkpoint_always_has_a_valid_one(form: str, async_save: bool, tmp_path: Path) -> None:
    make = partial(ZeroStrategy, 2, checkpoint=form, async_save=async_save)
    run_on_ranks(2, kept_by_model_checkpoint, make, tmp_path)


def full_disk(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def short_files() -> Iterator[None]:
    """Inside, no file of this process may be longer than 64 bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def no_commit() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "commit", full_disk)
        yield


def fails_everywhere(path: Path, form: str, broken: Callable[[], Any], ranks: set[int], told: str) -> None:
    """Some ranks cannot write: all raise, naming one, and what was there stays."""
    model = Tied()
    run = fitted(partial(ZeroStrategy, 2, stage=3, checkpoint=form), model)
    run.save_checkpoint(path)
    run.strategy.barrier()
    before = content(path)["state_dict"]
    model.table.weight.data.zero_()
    mine = run.global_rank in ranks
    text = told if mine else f"rank {min(ranks)} could not (write its shards|write it|commit|write).*{told}"
    with broken() if mine else nullcontext(), pytest.raises(OSError if mine else RuntimeError, match=text):
        run.save_checkpoint(path)
    run.strategy.barrier()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert valid_in(path.parent) == {path.name}
    require_like(before, content(path)["state_dict"], rtol=0, atol=0)


TOO_LARGE = r"File too large after .*file\.ckpt.*; make room"
BROKEN = {
    "sharded, rank 1": ("sharded", short_files, {1}, TOO_LARGE),
    "sharded, all": ("sharded", short_files, {0, 1}, TOO_LARGE),
    "full": ("full", short_files, {0}, TOO_LARGE),
    "commit": ("sharded", no_commit, {0}, "No space left"),
}


def fail_everywhere(folder: Path) -> None:
    for name, broken in BROKEN.items():
        fails_everywhere(folder / name / "file.ckpt", *broken)


def test_save_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    run_on_ranks(2, fail_everywhere, tmp_path, timeout=10.0)


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
                while trainer.strategy._saves().failure is None:
                    time.sleep(0.01)


def surfaces(path: Path, form: str, rank: int, size: int) -> None:
    failing = FailOnce(path, rank)
    make = HybridStrategy if size == 1 else partial(ZeroStrategy, 2)
    told = "No space left" if int(os.environ["RANK"]) == rank else f"rank {rank} could not write .*No space left"
    with pytest.raises((OSError, RuntimeError), match=told):
        fitted(partial(make, checkpoint=form, async_save=True), Tied(), callbacks=[failing])
    assert failing.begun <= 2
    assert not list(path.parent.iterdir())


@sampled(1, ("form", "size", "rank"), [("sharded", 2, 1), ("full", 1, 0), ("full", 2, 0)])
def test_background_save_that_fails_ends_the_next_step(form: str, size: int, rank: int, tmp_path: Path) -> None:
    run_on_ranks(size, surfaces, tmp_path / "file.ckpt", form, rank, size, timeout=10.0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip(f"nothing may be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


class Fills(ModelCheckpoint):
    """Takes what is free but for a few bytes, before the second save."""

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        if trainer.is_global_zero and trainer.global_step == 2:
            disk = Path(filepath).parent
            while not (disk / "step=1.ckpt").exists():  # which may be on its way in the background
                time.sleep(0.01)
            with (disk / "filler").open("wb", buffering=0) as file:
                file.write(b"x" * (os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 4096))
        trainer.strategy.barrier()
        super()._save_checkpoint(trainer, filepath)


def saves_until_it_is_full(disk: Path, options: dict[str, Any], told: str) -> None:
    """The second of several saves does not fit: the run ends by it on all ranks, with the first one left.

    ModelCheckpoint removes that one only once the next has been saved, in the background too.
    """
    often = Fills(disk, "{step}", every_n_train_steps=1, save_top_k=1)
    with pytest.raises((OSError, RuntimeError), match=told):
        fitted(partial(ZeroStrategy, 2, **options), Tied(), callbacks=[often], enable_checkpointing=True)


@sampled(1, ("form", "async_save"), [("sharded", True), ("sharded", False), ("full", True), ("full", False)])
def test_full_disk_ends_the_run_and_what_was_saved_stays(form: str, async_save: bool, disk: Path) -> None:
    no_space = "No space left on device after .*; make room there"
    told = no_space if form == "full" else "but only 4,096 are free; make room"
    options = {"checkpoint": form, "async_save": async_save}
    run_on_ranks(2, saves_until_it_is_full, disk, options, told, timeout=90.0)
    (disk / "filler").unlink()
    assert valid_in(disk) == {"step=1.ckpt"}
    assert [file.name for file in disk.iterdir()] == ["step=1.ckpt"]


def becomes_read_only(disk: Path, form: str) -> None:
    path = disk / "file.ckpt"
    run = fitted(partial(ZeroStrategy, 2, stage=3, checkpoint=form), Tied())
    run.save_checkpoint(path)
    if run.is_global_zero:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    run.strategy.barrier()
    with pytest.raises((OSError, RuntimeError), match=r"Read-only file system.*file\.ckpt"):
        run.save_checkpoint(path)
    run.strategy.barrier()
    refused_in(disk / "run", form)


@sampled(1, "form", FORMS)
def test_folder_that_becomes_read_only_ends_the_save(form: str, disk: Path) -> None:
    """Root writes past the modes of a folder, and not to a file system that is mounted to be read."""
    run_on_ranks(2, becomes_read_only, disk, form, timeout=20.0)
    assert valid_in(disk) == {"file.ckpt"}
    assert [file.name for file in disk.iterdir()] == ["file.ckpt"]


def refused_in(where: Path, form: str) -> None:
    said = "ModelCheckpoint would save checkpoints in .*, but .* is not writable: .*; pass another dirpath"
    make = partial(ZeroStrategy, 2, checkpoint=form)
    with pytest.raises((ValueError, RuntimeError), match=said):
        fitted(make, Tied(), callbacks=[ModelCheckpoint(where)], enable_checkpointing=True)


def no_memory(form: str) -> None:
    saver, make = ModelCheckpoint(os.environ["RANKS_SCRATCH"]), partial(ZeroStrategy, checkpoint=form)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refusals, "memory_of_host", lambda: 100)
        fitted(make, Tied())  # nobody saves
        if form == "sharded":
            fitted(make, Tied(), callbacks=[saver], enable_checkpointing=True)
            return
        with pytest.raises(ValueError, match=r"would gather 216 bytes .* its host has 100; pass checkpoint='sharded'"):
            fitted(make, Tied(), callbacks=[saver], enable_checkpointing=True)


def nobody_saves() -> None:
    with pytest.raises(ValueError, match="resume='auto' looks where a ModelCheckpoint saves, but the trainer has none"):
        fitted(partial(HybridStrategy, resume="auto"), Tied())


def test_folder_or_memory_that_cannot_do_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run_on_ranks(2, refused_in, Path("/proc/self/run"), "full")
    run_on_ranks(2, refused_in, tmp_path / "file" / "run", "sharded")
    for form in FORMS:
        run_on_ranks(2, no_memory, form)
    run_on_ranks(1, nobody_saves)


def test_arguments_are_checked() -> None:
    for wrong in ({"checkpoint": "shards"}, {"async_save": "yes"}, {"resume": True}, {"trust_checkpoint_code": 1}):
        with pytest.raises(ValueError, match=f"strategy\\({next(iter(wrong))}="):
            ZeroStrategy(2, **wrong)
    with pytest.raises(ValueError, match="AtomicCheckpointIO writes what one rank has; leave out the checkpoint_io"):
        trainer(ZeroStrategy(1, checkpoint="sharded", checkpoint_io=AtomicCheckpointIO()), devices=1)
