"""Real processes, started as a user's script starts them: they end together, soon, with the cause on screen."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SCRIPT = Path(__file__).with_name("launched.py")
ROOT = SCRIPT.parents[2]

pytestmark = pytest.mark.launched


AT_ONCE = 2
HANGS = 400  # seconds, after which a run is given up: who waits for a rank that has gone waits for half an hour


class Launch(NamedTuple):
    """A run of the script: how processes are started, and what happens on which rank."""

    start_method: str = "popen"
    event: str = "nothing"
    rank: int = 0
    strategy: str = "zero"


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
    command = [*WITHIN.get(run, ()), sys.executable, "-W", "ignore", str(SCRIPT), *map(str, run), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RUN_MARK": str(folder)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=HANGS, check=False, start_new_session=True
    )
    assert "event at " in done.stdout, done.stdout + done.stderr
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
    deadline = time.monotonic() + HANGS
    while left_behind(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_behind(folder) == []


@pytest.mark.exhaustive
@after(Launch("spawn"), Launch("popen"), Launch("fork"))
def test_every_way_to_start_gives_the_whole_model_back(ended):
    assert ended.code == 0, ended.output
    assert "finished with Parameter (8, 8)" in ended.output


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
