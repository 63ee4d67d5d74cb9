"""Real processes, started as a user's script starts them: they end together, soon, with the cause on screen."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.strategies.faults.launched import HANGS

SCRIPT = Path(__file__).with_name("launched.py")
ROOT = SCRIPT.parents[3]

pytestmark = pytest.mark.launched

TOO_LONG = 400  # seconds, after which a run is given up: who waits for a rank that has gone waits for half an hour


class Launch(NamedTuple):
    """A run of the script: how processes are started, and what happens on which rank."""

    start_method: str = "popen"
    event: str = "nothing"
    rank: int = 0
    strategy: str = "zero"
    ranks: int = 2

    def command(self) -> tuple[str, ...]:
        """What runs the script: Python, or torchrun, which keeps the store where ranks meet."""
        run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks))
        return (sys.executable, "-W", "ignore", *(run if self.start_method == "torchrun" else ()), str(SCRIPT))


AS_PROCESS_1 = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
"""How a container starts its command: in a namespace of process ids of its own."""
IN_CONTAINER = Launch(event="terminate", rank=1, strategy="tensor")
WITHIN = {IN_CONTAINER: AS_PROCESS_1}
MAY_UNSHARE = (
    shutil.which("unshare") is not None and subprocess.run([*AS_PROCESS_1, "true"], check=False).returncode == 0
)


class Ended(NamedTuple):
    folder: Path
    code: int
    output: str


@pytest.fixture
def ended(run: Launch, tmp_path: Path) -> Ended:
    command = [*WITHIN.get(run, ()), *run.command(), *map(str, run), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "RUN_MARK": str(tmp_path)}
    quiet = {"env": environment, "capture_output": True, "text": True, "check": False}
    done = subprocess.run(command, timeout=TOO_LONG, start_new_session=True, **quiet)
    assert "event at " in done.stdout or run.event in HANGS, done.stdout + done.stderr
    return Ended(tmp_path, done.returncode, done.stdout + done.stderr)


def after(*runs: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("run", runs, ids=lambda run: "-".join(map(str, run)))


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
    deadline = time.monotonic() + TOO_LONG
    while left_behind(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_behind(folder) == []


def exhaustive(*runs: Launch) -> list[Any]:
    return [pytest.param(run, marks=pytest.mark.exhaustive) for run in runs]


@after(Launch("torchrun"), *exhaustive(Launch("spawn"), Launch("popen", "works on")))
def test_ways_to_start_give_the_whole_model_back(ended, run):
    """Where the script starts its own ranks again, also to one that goes on when rank 0 has ended."""
    assert ended.code == 0, ended.output
    assert ended.output.count("finished with Parameter (16, 8)") == (1 if run.start_method == "spawn" else 2)


@pytest.mark.exhaustive
@after(Launch("torchrun", "dies first", 1), Launch("popen", "dies first", 1))
def test_rank_killed_before_it_joins_is_named_by_its_launcher(ended, run):
    """Which ends the others, before they can tell; nobody waits for the timeout of half an hour."""
    words = r"PID \d+ terminated with code -9" if run.start_method == "popen" else r"rank +: 1 [^/]*exitcode +: -9 "
    assert ended.code != 0
    assert re.search(words, ended.output), ended.output
    require_nobody_left(ended.folder)


SLEEPS = r"is in hang \(launched.py:\d+\) of step 3, at .*launched.py:\d+ in hang; the others wait in "
LEAVES_OUT = r"waits in .* of step 3, at .*; the others wait in barrier \(distributed_c10d.py:\d+\) of step 3"


@pytest.mark.exhaustive
@after(
    Launch("fork", "leaves out", 1, ranks=3),
    Launch("popen", "leaves out", 2, ranks=3),
    Launch("popen", "sleeps", 0),  # it launched the other
    Launch("torchrun", "sleeps", 1),
)
def test_last_line_after_a_hang_says_who_is_behind(ended, run):
    """But for rules and torchrun's own."""
    assert ended.code != 0
    last = [line for line in ended.output.splitlines() if line.strip() and not set(line) <= {"=", "-"}][-1]
    words = SLEEPS if run.event == "sleeps" else LEAVES_OUT
    assert re.search(rf"rank {run.rank} is behind: it {words}", last), ended.output


@after(
    Launch("fork", event="raise", rank=0, strategy="tensor"),
    # processes that order the members of a set otherwise
    *exhaustive(Launch(event="raise", rank=1, strategy="pipeline"), Launch(event="raise", rank=1)),
)
def test_rank_that_raises_ends_the_others_and_names_the_cause(ended, run):
    """In the last line too where processes are not forked; half a checkpoint is none."""
    assert ended.code != 0
    assert "the user's code failed here" in ended.output
    require_nobody_left(ended.folder)
    assert list(ended.folder.glob("*.ckpt")) == []
    if run.start_method == "popen":
        lines = ended.output.splitlines()
        assert "the user's code failed here" in [line for line in lines if line.strip()][-1], ended.output
        first = "RuntimeError: rank 1 failed first: RuntimeError: the user's"
        for words in ("trainer.fit(module", "EVENTS.get(", first):
            assert any(words in line for line in lines), ended.output


@pytest.mark.exhaustive
@after(
    Launch(event="kill", rank=0),  # it launched the others
    Launch("fork", event="kill", rank=1, strategy="pipeline"),  # it ends as one that raises does
    Launch(event="press Ctrl-C twice", rank=1),
)
def test_killed_rank_takes_the_others_down(ended):
    """And so does a second SIGINT."""
    assert ended.code != 0
    require_nobody_left(ended.folder)
    assert list(ended.folder.glob("*.ckpt")) == []


@after(
    pytest.param(IN_CONTAINER, marks=pytest.mark.skipif(not MAY_UNSHARE, reason="needs namespaces of process ids")),
    *exhaustive(Launch(event="terminate", rank=1)),
)
def test_sigterm_to_one_rank_stops_all_with_a_checkpoint(ended):
    assert ended.code == 143, ended.output
    assert len(list(ended.folder.glob("*.ckpt"))) == 1
    require_nobody_left(ended.folder)


@pytest.mark.exhaustive
@after(
    Launch(event="interrupt", rank=1, strategy="pipeline"),
    Launch(event="press Ctrl-C", strategy="pipeline"),
    Launch("fork", event="press Ctrl-C", rank=1),  # as in a notebook
)
def test_sigint_stops_all_after_the_same_step_with_a_checkpoint(ended):
    assert ended.code == 1, ended.output  # as Lightning ends one process
    assert ended.output.count("Detected KeyboardInterrupt") == 1, ended.output
    assert "Traceback" not in ended.output
    assert len(list(ended.folder.glob("*.ckpt"))) == 1
    require_nobody_left(ended.folder)
