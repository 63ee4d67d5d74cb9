"""Killed anywhere while it saves, a process leaves the checkpoint before or the new one, whole."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_parallel.checkpoint import commit
from tests.checkpoint.folders import is_step, load, save

TOUCHES = ("open", "os.", "shutil.", "ctypes.")


def die_at(number: int) -> None:
    """Kills this process at its n-th touch of the disk from now on."""
    touched = 0

    def count(event: str, _: Any) -> None:
        nonlocal touched
        touched += event.startswith(TOUCHES)
        if touched == number and event.startswith(TOUCHES):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def lives(number: int, act: Callable[[], Any]) -> bool:
    """Acts in a process that dies at its n-th touch; whether it lived to the end."""
    child = os.fork()
    if child == 0:
        die_at(number)
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def kill_everywhere(prepare: Callable[[], None], act: Callable[[], None], check: Callable[[], None]) -> int:
    for number in range(1, 500):
        prepare()
        lived = lives(number, act)
        check()
        if lived:
            return number
    raise AssertionError("it never ends")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    target, found = tmp_path / "last.ckpt", set()

    def check() -> None:
        got = load(target)
        found.add(got["global_step"])
        assert is_step(got, got["global_step"])

    assert kill_everywhere(lambda: save(target, 1), lambda: save(target, 2), check) > 20
    assert found == {1, 2}
    save(target, 3)  # sweeps away what the dead have left
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_folder_is_made_and_removed_at_once(tmp_path: Path) -> None:
    target = tmp_path / "new.ckpt"

    def check() -> None:
        assert not target.exists() or is_step(load(target), 2)

    kill_everywhere(lambda: commit.remove(target), lambda: save(target, 2), check)
    kill_everywhere(lambda: save(target, 2), lambda: commit.remove(target), check)


@pytest.mark.parametrize("before", ["file", "folder", "link"])
@pytest.mark.parametrize("after", ["file", "folder", "link"])
@pytest.mark.parametrize("exchanges", [True, False])
def test_anything_takes_the_place_of_anything(
    before: str, after: str, exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(commit.ctypes, "CDLL", lambda *_, **__: object())

    def make(kind: str, path: Path, text: str) -> None:
        if kind == "folder":
            path.mkdir()
        real = tmp_path / f"real_{text}"
        {"file": path, "folder": path / "file", "link": real}[kind].write_text(text)
        if kind == "link":
            path.symlink_to(real)

    make(before, target := tmp_path / "target", "before")
    make(after, made := tmp_path / "made", "after")
    commit.commit(made, target)
    assert (target / "file" if after == "folder" else target).read_text() == "after"
    assert {path.name for path in tmp_path.iterdir()} - {"real_before", "real_after"} == {"target"}
    assert "link" not in (before,) or (tmp_path / "real_before").read_text() == "before"


def test_link_is_put_in_one_step(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"{step}.ckpt", step)
        commit.link(tmp_path / f"{step}.ckpt", tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").is_symlink()
    assert is_step(load(tmp_path / "last.ckpt"), 2)


def test_leftovers_of_the_dead_alone_are_swept(tmp_path: Path) -> None:
    with commit.writing(tmp_path / "a.ckpt") as living:
        living.mkdir()
        dead, removed = (commit.temporary_name(tmp_path / "a.ckpt", kind) for kind in (commit.UNFINISHED, "removed"))
        of_another_host = tmp_path / dead.name.replace(commit.UNFINISHED, f"{commit.UNFINISHED}-another")
        for path in (dead, removed, of_another_host):
            path.mkdir()
        commit.sweep(tmp_path)
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {living.name, f"{living.name}.lock", of_another_host.name}
    assert [path.name for path in tmp_path.iterdir()] == [of_another_host.name]


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "--fork", "--pid", "true"], check=False).returncode != 0,
    reason="needs another pid namespace",
)
def test_files_of_another_container_are_not_swept(tmp_path: Path) -> None:
    """It sees the same folder and host name, and not the pid."""
    program = "import sys; from pathlib import Path; from lightning_parallel.checkpoint import commit; "
    program += "commit.sweep(Path(sys.argv[1]))"
    with commit.writing(tmp_path / "a.ckpt") as living:
        living.mkdir()
        subprocess.run(["unshare", "--fork", "--pid", sys.executable, "-c", program, tmp_path], check=True)
        assert living.is_dir()


def test_folder_that_the_dead_left_whole_gets_its_name(tmp_path: Path) -> None:
    target = tmp_path / "a.ckpt"
    dead, removed, other = (
        commit.temporary_name(target, kind) for kind in (commit.UNFINISHED, commit.REMOVED, commit.UNFINISHED)
    )
    for path in (dead, removed, other):
        path.mkdir()
    with commit.writing(tmp_path / "b.ckpt") as living:
        living.mkdir()
        assert commit.finish(living) == living
    assert not dead.exists()  # `writing` swept
    dead.mkdir()
    assert commit.finish(removed) == removed
    assert commit.finish(dead) == target
    assert target.is_dir()
    other.mkdir()
    assert commit.finish(other) == other  # another has the name
