"""Ranks that somebody else starts, by hand or as a cluster does, and one that does not live to join the others.

All others name it and end, long before the timeout; while they wait they say for whom.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_parallel import DataParallelStrategy
from lightning_parallel.strategies import rank_strategy
from lightning_parallel.strategies.ranks import failures, roll_call
from tests.ranks import POOL, free_port
from tests.strategies.joining import dies, nothing, raises
from tests.tiers import sampled

pytestmark = pytest.mark.launched

RANKS, ALL = 3, -1
TIMEOUT_SECONDS = 60.0
SILENT_SECONDS = 4.0


def fitted(before: Callable[[], Any], within: float) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=DataParallelStrategy(timeout=timedelta(seconds=within)),
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    before()
    trainer.fit(BoringModel())


def dies_when_it_has_come() -> None:
    def look(self: roll_call.RollCall) -> Sequence[int]:
        other = self._seen.get(1 - self._rank, (0, 0.0))
        return dies() if other[0] > 2 else looks(self)

    looks = roll_call.RollCall._look
    roll_call.RollCall._look = look


def dies_when_all_have_come() -> None:
    rank_strategy._init_dist_connection = lambda *_, **__: dies()


def stops_while_it_joins() -> None:
    looks = roll_call.RollCall._look

    def look(self: roll_call.RollCall) -> Sequence[int]:
        missing = looks(self)
        if len(self._seen) == RANKS - 1 and all(beats for beats, _ in self._seen.values()):
            os.kill(os.getpid(), signal.SIGSTOP)
        return missing

    roll_call.RollCall._look = look


def stops_in_a_step() -> None:
    def stop(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    BoringModel.training_step = stop


def comes_late() -> None:
    """Once rank 0 has said for whom it waits."""
    said = Path(os.environ["SAID_BY_RANKS"], "0")
    while not said.exists() or "rank 1 of 3 did not come to" not in said.read_text():
        time.sleep(0.05)


def raises_or_comes_late() -> None:
    if os.environ["LOCAL_RANK"] == "1":
        raises()
    if os.environ["LOCAL_RANK"] == "2":
        time.sleep(roll_call.PATIENCE_SECONDS + 1)


def all_start(rank: int, wanted: Sequence[int], folder: Path) -> None:
    """A machine may start one process long after another."""
    (folder / f"started_{rank}").touch()
    while not all((folder / f"started_{other}").exists() for other in wanted):
        time.sleep(0.01)


def runs(
    event: Callable[[], Any], chosen: int, rank: int, port: int, folder: Path, within: float, wanted: Sequence[int]
) -> None:
    place = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ["SAID_BY_RANKS"] = str(folder)
    os.environ.update({name: str(value) for name, value in place.items()})
    roll_call.TELLS_SECONDS = 1.0
    if event in (dies_when_it_has_come, dies_when_all_have_come):
        roll_call.SILENT_SECONDS = SILENT_SECONDS
    if event is stops_in_a_step:
        wait = roll_call.RollCall.wait
        roll_call.RollCall.wait = lambda self, _: wait(self, timedelta(seconds=TIMEOUT_SECONDS))
        failures.PATIENCE_SECONDS = 0.5
    if event is raises_or_comes_late:
        roll_call.PATIENCE_SECONDS = 0.5
    said = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    all_start(rank, wanted, folder)
    try:
        fitted(event if chosen in (rank, ALL) else nothing, within)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # as Python does for a script
        os._exit(1)
    os._exit(0)


def started(
    event: Callable[[], Any], chosen: int, folder: Path, without: int = -1, within: float = TIMEOUT_SECONDS
) -> list[BaseProcess]:
    POOL.warm_up()
    port, context = free_port(), get_context("forkserver")
    wanted = [rank for rank in range(RANKS) if rank != without]
    arguments = (port, folder, within, wanted)
    made = [context.Process(target=runs, args=(event, chosen, rank, *arguments)) for rank in wanted]
    for each in made:
        each.start()
    return made


def said_in(folder: Path) -> list[str]:
    """What each rank has said so far."""
    files = [folder / str(rank) for rank in range(RANKS)]
    return [file.read_text() if file.exists() else "" for file in files]


def ended(ranks: list[BaseProcess], folder: Path) -> list[str]:
    """What each rank said; they end by themselves, and do not wait for the timeout."""
    try:
        for each in ranks:
            each.join(TIMEOUT_SECONDS - 10)
        said = said_in(folder)
        assert all(each.exitcode is not None for each in ranks), said
        return said
    finally:
        for each in ranks:
            each.kill()


@sampled(1, "event", [comes_late, nothing])
def test_ranks_that_come_sooner_or_later_train(event: Callable[[], Any], tmp_path: Path) -> None:
    ranks = started(event, 1, tmp_path)
    said = ended(ranks, tmp_path)
    assert [each.exitcode for each in ranks] == [0, 0, 0], said
    assert event is nothing or "rank 1 of 3 did not come to 127.0.0.1:" in said[0]


@sampled(1, "chosen", [0, 1])
def test_a_rank_that_raises_before_it_joins_is_named_with_its_error(chosen: int, tmp_path: Path) -> None:
    said = ended(started(raises, chosen, tmp_path), tmp_path)
    told = f"RuntimeError: rank {chosen} failed before it could join the others: ValueError: a file of this rank"
    for rank in range(RANKS):
        assert "Traceback" in said[rank], said
        assert (told in said[rank]) == (rank != chosen), said


def test_a_rank_that_comes_late_hears_of_one_that_raised(tmp_path: Path) -> None:
    """Rank 0 waits for it: the store ends with rank 0, and who comes then would wait for the timeout."""
    said = ended(started(raises_or_comes_late, ALL, tmp_path), tmp_path)
    told = "RuntimeError: rank 1 failed before it could join the others: ValueError: a file of this rank"
    assert [told in each for each in said] == [True, False, True], said


@sampled(1, "chosen", [1, 0])
def test_a_rank_that_is_killed_while_it_waits_is_named(chosen: int, tmp_path: Path) -> None:
    """Both wait for a third."""
    ranks = started(dies_when_it_has_come, chosen, tmp_path, without=2)
    said = ended(ranks, tmp_path)
    assert ranks[chosen].exitcode == -signal.SIGKILL
    told = (
        r"RuntimeError: rank 1 came to .*, and has been silent for" if chosen else "while ranks joined: that is rank 0"
    )
    assert re.search(told, said[1 - chosen]), said


def test_a_rank_that_is_killed_while_the_group_is_formed_is_named(tmp_path: Path) -> None:
    """The others are within the backend then, which ends at the timeout."""
    ranks, deadline = started(dies_when_all_have_come, 1, tmp_path), time.monotonic() + TIMEOUT_SECONDS - 10
    try:
        while any("] rank 1 came to " not in said_in(tmp_path)[rank] for rank in (0, 2)):
            assert time.monotonic() < deadline, said_in(tmp_path)
            time.sleep(0.1)
    finally:
        for each in ranks:
            each.kill()


@sampled(1, ("event", "within"), [(stops_in_a_step, 4.0), (stops_while_it_joins, TIMEOUT_SECONDS)])
def test_all_others_end_when_rank_0_is_stopped_which_keeps_the_store(
    event: Callable[[], Any], within: float, tmp_path: Path
) -> None:
    first, *others = started(event, 0, tmp_path, within=within)
    try:
        for each in others:
            each.join(TIMEOUT_SECONDS - 10)
        said = said_in(tmp_path)
        assert [each.exitcode for each in others] == [1, 1], said
        assert first.exitcode is None
        told = (
            "rank 0 or torchrun, does not answer: it is stopped"
            if event is stops_in_a_step
            else ", or is stopped, while"
        )
        assert all(told in each for each in said[1:]), said
    finally:
        for each in (first, *others):
            each.kill()


def test_a_rank_that_does_not_come_is_named_when_the_time_is_up(tmp_path: Path) -> None:
    """Rank 0 ends with it. Its end may be what rank 1 hears first, whose line has named the rank by then."""
    said = ended(started(nothing, 0, tmp_path, without=2, within=8.0), tmp_path)[:2]
    for rank, each in enumerate(said):
        assert f"[rank{rank}] rank 2 of 3 did not come to 127.0.0.1:" in each
    in_time = r"RuntimeError: rank 2 of 3 did not come .* within \d+ s, the strategy's timeout; look at"
    assert re.search(in_time, said[0]), said
    assert re.search(in_time, said[1]) or "while ranks joined: that is rank 0" in said[1], said


@pytest.mark.parametrize("started_by_srun", [False, True])
def test_who_waits_under_slurm_is_told_of_srun(
    started_by_srun: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once where the script was not started by it; else with the first message, which others may come before."""
    task = {"NTASKS": 2, "NTASKS_PER_NODE": 2, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_ID": 7, "JOB_NAME": "train"}
    for name, value in (task | {"STEP_ID": 0} if started_by_srun else task).items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 did not come .*; under SLURM, srun starts all ranks: srun "):
        roll_call.RollCall(SLURMEnvironment()).wait(timedelta(seconds=0.1))
    assert ("srun python SCRIPT; still waiting" in capsys.readouterr().err) != started_by_srun
