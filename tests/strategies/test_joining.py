"""Ranks that somebody else starts, by hand or as a cluster does; while they wait for others they say for whom."""

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
from lightning_parallel.strategies.ranks import failures, launchers
from tests.ranks import POOL, free_port
from tests.tiers import sampled

pytestmark = pytest.mark.launched

RANKS, ALL = 3, -1
TIMEOUT_SECONDS = 60.0


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


def nothing() -> None:
    pass


def stops_in_a_step() -> None:
    def stop(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    BoringModel.training_step = stop


def comes_late() -> None:
    """Once rank 0 has said for whom it waits."""
    said = Path(os.environ["SAID_BY_RANKS"], "0")
    while not said.exists() or "rank 1 of 3 has not joined" not in said.read_text():
        time.sleep(0.05)


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
    launchers.REPORT_SECONDS = 1.0
    if event is stops_in_a_step:
        wait = rank_strategy.wait_for_all
        rank_strategy.wait_for_all = lambda environment, _: wait(environment, timedelta(seconds=TIMEOUT_SECONDS))
        failures.PATIENCE_SECONDS = 0.5
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
    assert event is nothing or "rank 1 of 3 has not joined at 127.0.0.1:" in said[0]


def test_all_others_end_when_rank_0_is_stopped_which_keeps_the_store(tmp_path: Path) -> None:
    first, *others = started(stops_in_a_step, 0, tmp_path, within=4.0)
    try:
        for each in others:
            each.join(TIMEOUT_SECONDS - 10)
        said = said_in(tmp_path)
        assert [each.exitcode for each in others] == [1, 1], said
        assert first.exitcode is None
        assert all("rank 0 or torchrun, does not answer: it is stopped" in each for each in said[1:]), said
    finally:
        for each in (first, *others):
            each.kill()


def test_a_rank_that_does_not_come_is_named_when_the_time_is_up(tmp_path: Path) -> None:
    """Rank 0 ends with it. Its end may be what rank 1 hears first, whose line has named the rank by then."""
    said = ended(started(nothing, 0, tmp_path, without=2, within=8.0), tmp_path)[:2]
    for rank, each in enumerate(said):
        assert f"[rank{rank}] rank 2 of 3 has not joined at 127.0.0.1:" in each
    in_time = r"RuntimeError: rank 2 of 3 has not joined .* after \d+ s; that is the strategy's timeout: look at"
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
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 has not joined .*; under SLURM, srun starts all ranks: srun "):
        launchers.wait_for_all(SLURMEnvironment(), timedelta(seconds=0.1))
    assert ("srun python SCRIPT; still waiting" in capsys.readouterr().err) != started_by_srun
