"""While ranks wait for others to join they say for whom, and when the time is up they end."""

import io
import os
import signal
import time
from contextlib import redirect_stderr
from datetime import timedelta
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lightning_parallel.collectives.functional import call_with_timeout
from lightning_parallel.strategies.ranks import launchers
from tests.ranks import POOL, free_port, run_on_ranks
from tests.trainers import PoolEnvironment


class Said(io.StringIO):
    """Makes a file when somebody is waited for."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def write(self, text: str) -> int:
        if "has not joined" in text:
            self.file.touch()
        return super().write(text)


def joins(port: int, folder: Path, comes: bool) -> str:
    """Rank 1 comes once rank 0 has said that it waits, or never; rank 0 keeps the store until both have joined."""
    os.environ["MASTER_PORT"], told = str(port), folder / "told"
    if dist.get_rank() == 1:
        while not told.exists():
            time.sleep(0.01)
        if not comes:
            return ""
    with redirect_stderr(Said(told)) as said, mock.patch.object(launchers, "REPORT_SECONDS", 0.2):
        store = launchers.wait_for_all(PoolEnvironment(), timedelta(seconds=60.0 if comes else 1.0))
        dist.barrier()
        del store
    return said.getvalue()


def test_ranks_that_come_late_are_named_and_join(tmp_path: Path) -> None:
    said, _ = run_on_ranks(2, joins, free_port(), tmp_path, True)
    assert "[rank0] rank 1 of 2 has not joined at 127.0.0.1:" in said


@pytest.mark.exhaustive
def test_rank_that_does_not_come_is_named_when_time_is_up(tmp_path: Path) -> None:
    in_time = r"RuntimeError: rank 1 of 2 has not joined .* after \d+ s; that is the strategy's timeout: look at"
    with pytest.raises(AssertionError, match=in_time):
        run_on_ranks(2, joins, free_port(), tmp_path, False)


def keep_a_store(ours: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours.send(store.port)
    time.sleep(600)


def test_store_of_a_stopped_process_is_not_waited_for() -> None:
    """A store waits forever for its process, which is rank 0's or torchrun's."""
    POOL.warm_up()
    ours, theirs = Pipe()
    keeper = get_context("forkserver").Process(target=keep_a_store, args=(theirs,))
    keeper.start()
    try:
        store = dist.TCPStore("127.0.0.1", ours.recv(), is_master=False)
        assert not call_with_timeout(30, store.check, ["joined"])
        os.kill(keeper.pid or 0, signal.SIGSTOP)
        while " T " not in Path(f"/proc/{keeper.pid}/stat").read_text():  # its threads stop one after the other
            time.sleep(0.01)
        with pytest.raises(dist.DistNetworkError, match="rank 0 or torchrun, does not answer: it is stopped"):
            call_with_timeout(0.5, store.check, ["joined"])
    finally:
        keeper.kill()


@pytest.mark.parametrize("started_by_srun", [False, True])
def test_waiting_ranks_under_slurm_are_told_of_srun(
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
