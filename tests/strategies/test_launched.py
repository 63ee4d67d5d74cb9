"""Real processes, started as a user's script starts them: they end together, soon, with the cause on screen."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.strategies.launched import HANGS

SCRIPT = Path(__file__).with_name("launched.py")
ROOT = SCRIPT.parents[2]

pytestmark = pytest.mark.launched


AT_ONCE = 2
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


def launch(run: Launch, folder: Path) -> Ended:
    command = [*WITHIN.get(run, ()), *run.command(), *map(str, run), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "RUN_MARK": str(folder)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TOO_LONG, check=False, start_new_session=True
    )
    assert "event at " in done.stdout or run.event in HANGS, done.stdout + done.stderr
    return Ended(folder, done.returncode, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def launches(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Launch, Future[Ended]]]:
    """Those that the chosen tests ask for, some at once: most of their time processes import, one after the other."""
    mine = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    with ThreadPoolExecutor(AT_ONCE) as executor:
        wanted = dict.fromkeys(item.callspec.params["run"] for item in mine if "run" in item.fixturenames)
        yield {run: executor.submit(launch, run, tmp_path_factory.mktemp("run")) for run in wanted}


@pytest.fixture
def ended(launches: dict[Launch, Future[Ended]], run: Launch) -> Ended:
    return launches[run].result()


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


@after(
    Launch("torchrun"),
    *(pytest.param(Launch(how), marks=pytest.mark.exhaustive) for how in ("spawn", "popen", "fork")),
)
def test_every_way_to_start_gives_the_whole_model_back(ended):
    assert ended.code == 0, ended.output
    assert "finished with Parameter (8, 8)" in ended.output


@pytest.mark.exhaustive
@after(Launch("torchrun", "dies first", 1), Launch("popen", "dies first", 1))
def test_one_that_is_killed_before_it_joins_is_named_by_who_started_it(ended, run):
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
    Launch("torchrun", "leaves out", 2, ranks=3),
    Launch("popen", "sleeps", 0),  # it launched the other
    Launch("popen", "sleeps", 1, ranks=3),
    Launch("spawn", "sleeps", 1),
    Launch("torchrun", "sleeps", 1),
)
def test_of_a_hang_the_launcher_says_in_the_end_who_is_behind(ended, run):
    """In the last line but for rules and torchrun's own."""
    assert ended.code != 0
    last = [line for line in ended.output.splitlines() if line.strip() and not set(line) <= {"=", "-"}][-1]
    words = SLEEPS if run.event == "sleeps" else LEAVES_OUT
    assert re.search(rf"rank {run.rank} is behind: it {words}", last), ended.output


@after(
    # processes that order the members of a set otherwise
    pytest.param(Launch(event="raise", rank=1, strategy="pipeline"), marks=pytest.mark.exhaustive),
    Launch("fork", event="raise", rank=0, strategy="tensor"),
)
def test_a_rank_that_raises_takes_the_others_down_with_the_cause_on_screen(ended):
    require_the_cause_on_screen(ended)


@pytest.mark.exhaustive
@after(Launch(event="raise", rank=1), Launch("fork", event="raise", rank=0))
def test_so_it_is_under_zero(ended):
    require_the_cause_on_screen(ended)


def require_the_cause_on_screen(ended: Ended) -> None:
    assert ended.code != 0
    assert "the user's code failed here" in ended.output
    require_nobody_left(ended.folder)
    assert list(ended.folder.glob("*.ckpt")) == []  # half a checkpoint is none


@pytest.mark.exhaustive
@after(Launch(event="raise", rank=1, strategy="pipeline"))
def test_all_ranks_end_with_the_first_failure(ended):
    require_first_failure(ended)


@pytest.mark.exhaustive
@after(Launch(event="raise", rank=1))
def test_all_ranks_end_with_the_first_failure_under_zero(ended):
    require_first_failure(ended)


def require_first_failure(ended: Ended) -> None:
    last = [line for line in ended.output.splitlines() if line.strip()][-1]
    assert "the user's code failed here" in last, ended.output
    for line in (
        "trainer.fit(module",
        "EVENTS[self.event]()",
        "RuntimeError: rank 1 failed first: RuntimeError: the user's",
    ):
        assert any(line in found for found in ended.output.splitlines()), ended.output


FAILS_SOON_AFTER = """
import subprocess, sys, time
from lightning_parallel.strategies.ranks.launchers import _Observer
launched = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
_Observer([launched], lambda: "").start()
launched.wait()
time.sleep(5.5)  # more than a round of the observer
raise SystemExit("the cause")
"""


@pytest.mark.exhaustive
def test_who_launched_the_rank_that_failed_has_time_to_say_why() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILS_SOON_AFTER], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "the cause")


@pytest.mark.exhaustive
@after(Launch(event="kill", rank=0))  # it launched the others
def test_a_killed_rank_takes_the_others_down(ended):
    require_all_gone(ended)


@pytest.mark.exhaustive
@after(Launch("fork", event="kill", rank=1, strategy="pipeline"))  # it ends as one that raises does
def test_a_killed_rank_that_was_forked_takes_the_others_down(ended):
    require_all_gone(ended)


def require_all_gone(ended: Ended) -> None:
    assert ended.code != 0
    require_nobody_left(ended.folder)


@after(
    Launch(event="terminate", rank=1),  # `test_signals.py` has both
    pytest.param(IN_CONTAINER, marks=pytest.mark.skipif(not MAY_UNSHARE, reason="needs namespaces of process ids")),
)
def test_sigterm_to_one_rank_stops_all_after_the_same_step_with_a_checkpoint(ended):
    assert ended.code == 143, ended.output
    assert len(list(ended.folder.glob("*.ckpt"))) == 1
    require_nobody_left(ended.folder)


@after(
    Launch(event="interrupt", rank=1, strategy="pipeline"),
    pytest.param(Launch(event="press Ctrl-C", strategy="pipeline"), marks=pytest.mark.exhaustive),
    pytest.param(Launch("fork", event="press Ctrl-C", rank=1), marks=pytest.mark.exhaustive),  # as in a notebook
    pytest.param(Launch("spawn", event="press Ctrl-C", rank=1), marks=pytest.mark.exhaustive),
)
def test_sigint_stops_all_after_the_same_step_with_a_checkpoint(ended):
    assert ended.code == 1, ended.output  # as Lightning ends one process
    assert ended.output.count("Detected KeyboardInterrupt") == 1, ended.output
    assert "Traceback" not in ended.output
    assert len(list(ended.folder.glob("*.ckpt"))) == 1
    require_nobody_left(ended.folder)


@pytest.mark.exhaustive
@after(Launch(event="press Ctrl-C twice", rank=1))
def test_a_second_sigint_ends_all_at_once(ended):
    require_all_gone(ended)
    assert list(ended.folder.glob("*.ckpt")) == []
