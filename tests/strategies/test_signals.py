"""Signals to one rank are answered by all, between the same two batches."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_parallel import ZeroStrategy
from lightning_parallel.strategies.ranks.launchers import end_children
from tests.ranks import run_on_ranks


class Ask(Callback):
    """Sends this process a signal, on one rank only."""

    def __init__(self, number: int, rank: int, at: int) -> None:
        self.number, self.rank, self.at = number, rank, at
        self.trained = 0

    def on_train_batch_end(self, trainer: Trainer, _: LightningModule, __: object, ___: object, batch_idx: int) -> None:
        self.trained += 1
        if trainer.global_rank == self.rank and batch_idx == self.at:
            os.kill(os.getpid(), self.number)


def under_slurm(folder: str, number: int, rank: int) -> tuple[int, list[str], object]:
    world = os.environ["WORLD_SIZE"]
    os.environ |= {
        "SLURM_NTASKS": world,
        "SLURM_NTASKS_PER_NODE": world,
        "SLURM_PROCID": os.environ["RANK"],
        "SLURM_LOCALID": os.environ["RANK"],
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
    }
    ask = Ask(number, rank, at=2)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(world),
        strategy=ZeroStrategy(),
        plugins=[SLURMEnvironment(auto_requeue=True)],
        max_steps=6,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[ask],
    )
    before = signal.getsignal(number)
    code = None
    try:
        trainer.fit(BoringModel())
    except SystemExit as stopped:
        code = stopped.code
    assert signal.getsignal(number) in (before, signal.SIG_DFL)
    return ask.trained, sorted(name for name in os.listdir(folder) if name.startswith("hpc")), code


@pytest.mark.parametrize("rank", [0, 1])
def test_requeue_request_saves_between_batches(tmp_path, rank):
    for trained, saved, code in run_on_ranks(2, under_slurm, str(tmp_path), signal.SIGUSR1, rank):
        assert (trained, saved, code) == (6, ["hpc_ckpt_1.ckpt"], None)
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    assert saved["global_step"] == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_request_to_stop_ends_all_ranks_before_the_same_batch(tmp_path, rank):
    for trained, _, code in run_on_ranks(2, under_slurm, str(tmp_path), signal.SIGTERM, rank):
        assert (trained, code) == (3, 143)


def test_processes_that_do_not_end_are_killed() -> None:
    script = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    forked = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
    forked.start()
    end_children([script, forked])
    forked.join(300)
    assert (script.wait(300), forked.exitcode) == (-signal.SIGKILL, -signal.SIGKILL)


SLOW_AFTERWARDS = """
import sys, time
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_parallel import DataParallelStrategy

if __name__ == "__main__":
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=DataParallelStrategy(), limit_predict_batches=1, **quiet)
    trainer.predict(BoringModel())
    time.sleep(3 * trainer.global_rank)
    print("rank", trainer.global_rank, "has written what it predicted", flush=True)
"""


@pytest.mark.exhaustive
def test_work_after_a_run_is_done_though_rank_0_ends_first(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SLOW_AFTERWARDS)
    command = [sys.executable, "-W", "ignore", str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank} has written" in done.stdout for rank in (0, 1)), done.stdout
