"""Real processes, started as a user's script starts them: they end together, soon, with the cause on screen."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

SCRIPT = Path(__file__).with_name("launched.py")
ROOT = SCRIPT.parents[2]

pytestmark = pytest.mark.launched


class Ended(NamedTuple):
    code: int
    output: str
    seconds_after_event: float


def launch(folder: Path, start_method: str = "popen", event: str = "nothing", rank: int = 0) -> Ended:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), start_method, event, str(rank), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RUN_MARK": str(folder)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    ended = time.time()
    told = re.search(r"event at ([\d.]+)", run.stdout)
    assert told, run.stdout + run.stderr
    return Ended(run.returncode, run.stdout + run.stderr, ended - float(told[1]))


def left_behind(folder: Path) -> list[str]:
    """Processes that were started with this run's mark in their environment and still live."""
    mark = f"RUN_MARK={folder}".encode()
    alive = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                alive.append(entry.name)
        except OSError:  # ended meanwhile, or not ours
            continue
    return alive


def require_nobody_left(folder: Path) -> None:
    deadline = time.monotonic() + 5
    while left_behind(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_behind(folder) == []


@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
def test_every_way_to_start_gives_the_whole_model_back(tmp_path, start_method):
    ended = launch(tmp_path, start_method)
    assert ended.code == 0, ended.output
    assert "finished with Parameter (8, 8)" in ended.output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_takes_the_others_down_with_the_cause_on_screen(tmp_path, rank):
    ended = launch(tmp_path, event="raise", rank=rank)
    assert ended.code != 0
    assert "the user's code failed here" in ended.output
    assert ended.seconds_after_event < 10
    require_nobody_left(tmp_path)
    assert list(tmp_path.glob("*.ckpt")) == []  # half a checkpoint is none


@pytest.mark.parametrize("rank", [0])  # rank 1 ends as one that raises does; rank 0 launched the others
def test_a_killed_rank_takes_the_others_down(tmp_path, rank):
    ended = launch(tmp_path, event="kill", rank=rank)
    assert ended.code != 0
    assert ended.seconds_after_event < 10
    require_nobody_left(tmp_path)


@pytest.mark.parametrize("rank", [1])  # `test_signals.py` has both
def test_sigterm_to_one_rank_stops_all_after_the_same_step_with_a_checkpoint(tmp_path, rank):
    ended = launch(tmp_path, event="terminate", rank=rank)
    assert ended.code == 143, ended.output
    assert ended.seconds_after_event < 10
    assert len(list(tmp_path.glob("*.ckpt"))) == 1
    require_nobody_left(tmp_path)
