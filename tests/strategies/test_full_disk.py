"""A disk that is really full, or cannot be written to, while ranks save: all are told, and what was there stays.

The disk is a small file system in memory, mounted for the test where that is permitted. Everywhere, files may not
become longer than some bytes (RLIMIT_FSIZE), which fails at the same calls with another number.
"""

import errno
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_parallel import ZeroStrategy
from lightning_parallel.strategies.checkpoint.saver import Background
from tests.ranks import run_on_ranks
from tests.strategies.test_checkpoint_faults import valid_in
from tests.strategies.test_checkpoint_use import Tied, fitted
from tests.tiers import sampled

FORMS = {
    "full": {},
    "sharded": {"checkpoint": "sharded"},
    "full in the background": {"checkpoint": "full", "async_save": True},
    "in the background": {"checkpoint": "sharded", "async_save": True},
}
DISK_BYTES = 256 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
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


def fill(disk: Path) -> None:
    """Takes what is free but for a few bytes."""
    with (disk / "filler").open("wb", buffering=0) as file:
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        file.write(b"x" * (free - 4096))


def await_file(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} was not saved in 60 s"
        time.sleep(0.01)


def saves_until_it_is_full(folder: Path, form: str, told: str) -> None:
    """The second of several saves does not fit: the run ends by it on all ranks, with the first one left."""

    class Fills(ModelCheckpoint):
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            if trainer.is_global_zero and trainer.global_step == 2:
                await_file(folder / "step=1.ckpt")  # which may be on its way in the background
                fill(folder)
            trainer.strategy.barrier()
            super()._save_checkpoint(trainer, filepath)

    often = Fills(folder, "{step}", every_n_train_steps=1, save_top_k=1)
    make = partial(ZeroStrategy, 2, stage=3, **FORMS[form])
    with pytest.raises((OSError, RuntimeError), match=told):
        fitted(make, Tied(), callbacks=[often], enable_checkpointing=True)


@sampled(2, "form", FORMS)
def test_a_full_disk_ends_the_run_and_what_was_saved_stays(form: str, disk: Path) -> None:
    told = (
        "and 4,096 are free there; make room" if "full" not in form else "No space left on device, .*; make room there"
    )
    run_on_ranks(2, saves_until_it_is_full, disk, form, told, timeout=90.0)
    (disk / "filler").unlink()
    assert valid_in(disk) == {"step=1.ckpt"}
    assert [file.name for file in disk.iterdir()] == ["step=1.ckpt"]


@pytest.mark.parametrize("late", [False, True], ids=["begun while it is saved", "begun when it has failed"])
def test_what_follows_a_save_that_fails_is_never_done(late: bool) -> None:
    """ModelCheckpoint removes the last checkpoint once it has begun the next one, early or late."""
    background, may_fail, removed = Background(), Event(), []

    def fails() -> None:
        may_fail.wait()
        raise OSError(errno.ENOSPC, "No space left on device")

    background.begin(fails)
    if late:
        may_fail.set()
        while not background.failed:
            time.sleep(0.001)
    background.afterwards(partial(removed.append, "the last checkpoint"))
    may_fail.set()
    with pytest.raises(OSError, match="No space left"):
        background.wait()
    assert not removed
    background.afterwards(partial(removed.append, "another one, when it has been told"))
    assert len(removed) == 1


def saves_in_files_that_are_too_short(folder: Path, form: str) -> None:
    path = folder / "file.ckpt"
    run = fitted(partial(ZeroStrategy, 2, stage=3, checkpoint=form), Tied())
    run.save_checkpoint(path)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises((OSError, RuntimeError), match=r"File too large, after .*file\.ckpt.*; make room"):
            run.save_checkpoint(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run.strategy.barrier()


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_files_that_cannot_be_written_whole_are_an_error_on_all_ranks(form: str, tmp_path: Path) -> None:
    run_on_ranks(2, saves_in_files_that_are_too_short, tmp_path / "run", form, timeout=20.0)
    assert valid_in(tmp_path / "run") == {"file.ckpt"}
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["file.ckpt"]


def saves_where_nobody_may(folder: Path, form: str) -> None:
    saver = ModelCheckpoint(folder / "run")
    said = "ModelCheckpoint would save checkpoints in .*, and nobody can write to .*: .*; pass it another dirpath"
    with pytest.raises((ValueError, RuntimeError), match=said):
        fitted(partial(ZeroStrategy, 2, checkpoint=form), Tied(), callbacks=[saver], enable_checkpointing=True)


def becomes_read_only(folder: Path, form: str) -> None:
    path = folder / "file.ckpt"
    run = fitted(partial(ZeroStrategy, 2, stage=3, checkpoint=form), Tied())
    run.save_checkpoint(path)
    if run.is_global_zero:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    run.strategy.barrier()
    with pytest.raises((OSError, RuntimeError), match=r"Read-only file system.*file\.ckpt"):
        run.save_checkpoint(path)
    run.strategy.barrier()


@sampled(1, "form", ["full", "sharded"])
def test_a_folder_that_becomes_read_only_ends_the_save_and_one_that_is_ends_the_run(form: str, disk: Path) -> None:
    """Root writes past the modes of a folder, and not to a file system that is mounted to be read."""
    run_on_ranks(2, becomes_read_only, disk, form, timeout=20.0)
    assert valid_in(disk) == {"file.ckpt"}
    assert [file.name for file in disk.iterdir()] == ["file.ckpt"]
    run_on_ranks(2, saves_where_nobody_may, disk, form, timeout=20.0)
