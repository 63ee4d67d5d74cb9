"""A signal to one rank is answered by all, between the same two batches; a second SIGINT ends the process at once."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from lightning_parallel import ZeroStrategy
from lightning_parallel.strategies.ranks.failures import Signals
from lightning_parallel.strategies.ranks.launchers import end_children
from tests.heard import heard
from tests.ranks import run_on_ranks
from tests.strategies.faults.regression import LAYOUTS, Regression, fail_on, loader
from tests.tiers import sampled
from tests.trainers import trainer


class Evaluated(Regression):
    """Counts the batches that it evaluates."""

    evaluated = 0

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.evaluated += 1
        self.at("evaluation", batch_idx)
        return batch

    test_step = predict_step = validation_step


def interrupt(ranks: list[int], module: LightningModule) -> None:
    """Sends this process the first SIGINT, once: a pipeline may call a step more often."""
    if module.global_rank in ranks and signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        signal.raise_signal(signal.SIGINT)


def ended(make: Callable[[], Any], verb: str, module: Regression, folder: Path) -> tuple[Any, list[str], bool]:
    """How a run ended on one rank, what was said of checkpoints, and whether the user's handler is back."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a script; ranks of the pool ignore it
    saves = ModelCheckpoint(folder, filename="interrupted", save_on_exception=True)
    running = trainer(make(), max_steps=4, callbacks=[saves], enable_checkpointing=True)
    raises = pytest.raises((SystemExit, ValueError, RuntimeError))
    with heard(logging.INFO, "lightning.pytorch") as said, heard(logging.INFO) as ours, raises as stopped:
        getattr(running, verb)(module, loader())
    assert saves.save_on_exception
    place = module.evaluated if isinstance(module, Evaluated) else running.global_step
    end = getattr(stopped.value, "code", stopped.typename), running.state.status.value, place
    handler_is_back = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return end, [line for line in said + ours if "checkpoint" in line.lower()], handler_is_back


@sampled(
    1,
    ("layout", "ranks"),
    [("pipeline", [1]), ("zero 3", [0, 1]), ("tensor parallel", [1]), ("data parallel", [0, 1])],
)
def test_first_sigint_stops_all_ranks_before_the_same_batch(layout: str, ranks: list[int], tmp_path: Path) -> None:
    module = Regression("training_step", partial(interrupt, ranks))
    found = run_on_ranks(2, ended, LAYOUTS[layout].strategy, "fit", module, tmp_path)
    assert [(end, back) for end, _, back in found] == [((1, "interrupted", 2), True)] * 2
    assert any("KeyboardInterrupt was raised" in line and "saved checkpoint to" in line for line in found[0][1])
    saved = torch.load(tmp_path / "interrupted.ckpt", weights_only=True)
    assert (saved["global_step"], len(saved["optimizer_states"][0]["state"])) == (2, 8)


def ended_evaluations(folder: Path) -> list[Any]:
    modules = {verb: Evaluated("evaluation", partial(interrupt, [1])) for verb in ("validate", "test", "predict")}
    return [ended(ZeroStrategy, verb, module, folder)[0] for verb, module in modules.items()]


def test_first_sigint_stops_evaluations_too(tmp_path: Path) -> None:
    assert run_on_ranks(2, ended_evaluations, tmp_path) == [[(1, "interrupted", 2)] * 3] * 2


def test_checkpoint_that_was_not_saved_is_not_logged(tmp_path: Path) -> None:
    module = Regression("training_step", partial(fail_on, 1))
    for (error, *_), said, _ in run_on_ranks(2, ended, ZeroStrategy, "fit", module, tmp_path):
        assert error in ("ValueError", "RuntimeError")
        assert said == ["No checkpoint of this exception: not all ranks could save, so shards of others are missing"]
    assert list(tmp_path.iterdir()) == []


class Reads(torch.utils.data.Dataset[Tensor]):
    """Its first worker is interrupted, as all processes of a terminal are."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        if get_worker_info() is not None and index == 0:
            signal.raise_signal(signal.SIGINT)
        return torch.full((8,), float(index))


def trains_with_workers() -> tuple[int, Any]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    running = trainer(LAYOUTS["data parallel"].strategy(), max_steps=4)
    running.fit(Regression(), DataLoader(Reads(), batch_size=2, num_workers=1))
    return running.global_step, signal.getsignal(signal.SIGINT)


def test_workers_of_loaders_go_on_until_their_ranks_stop() -> None:
    assert run_on_ranks(2, trains_with_workers) == [(4, signal.default_int_handler)] * 2


def own(*_: Any) -> None:
    pass


def within_runs() -> list[tuple[Any, int]]:
    """What handles the next SIGINT after a first one, in runs that began with different handlers."""
    found = []
    for handler in (signal.default_int_handler, own, signal.SIG_IGN):
        signal.signal(signal.SIGINT, handler)
        signals = Signals(trainer(LAYOUTS["data parallel"].strategy()))
        with ExitStack() as back:
            signals.install(back)
            signal.raise_signal(signal.SIGINT)
            found.append((signal.getsignal(signal.SIGINT), signals.stop))
    return found


def test_second_sigint_ends_at_once_and_own_handlers_stay() -> None:
    assert run_on_ranks(1, within_runs) == [[(signal.SIG_DFL, signal.SIGINT), (own, 0), (signal.SIG_IGN, 0)]]


class Ask(Callback):
    """Sends a signal to one rank after its third batch, and SIGTERM to the other after its fifth."""

    def __init__(self, rank: int) -> None:
        self.sent = {(rank, 2): signal.SIGUSR1, (1 - rank, 4): signal.SIGTERM}
        self.trained = 0

    def on_train_batch_end(self, trainer: Trainer, _: LightningModule, __: object, ___: object, batch_idx: int) -> None:
        self.trained += 1
        if number := self.sent.get((trainer.global_rank, batch_idx)):
            os.kill(os.getpid(), number)


def under_slurm(folder: str, rank: int) -> tuple[int, list[str], object]:
    world, ours = os.environ["WORLD_SIZE"], os.environ["RANK"]
    task = {"NTASKS": world, "NTASKS_PER_NODE": world, "PROCID": ours, "LOCALID": ours, "NODEID": "0"}
    os.environ |= {f"SLURM_{name}": value for name, value in (task | {"JOB_ID": "7", "JOB_NAME": "train"}).items()}
    ask = Ask(rank)
    environment = SLURMEnvironment(auto_requeue=True)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    run = {"max_steps": 8, "limit_val_batches": 0, "default_root_dir": folder, "callbacks": [ask]}
    used = Trainer(
        accelerator="cpu", devices=int(world), strategy=ZeroStrategy(), plugins=[environment], **quiet, **run
    )
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    with pytest.raises(SystemExit) as stopped:
        used.fit(BoringModel())
    for number, handler in before.items():
        assert signal.getsignal(number) in (handler, signal.SIG_DFL)
    return ask.trained, sorted(name for name in os.listdir(folder) if name.startswith("hpc")), stopped.value.code


@sampled(1, "rank", [0, 1])
def test_requests_to_requeue_and_to_stop_reach_all_ranks(tmp_path: Path, rank: int) -> None:
    """The first saves between batches, after the second all end before the same batch."""
    for trained, saved, code in run_on_ranks(2, under_slurm, str(tmp_path), rank):
        assert (trained, saved, code) == (5, ["hpc_ckpt_1.ckpt"], 143)
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)["global_step"] == 3


def test_processes_that_do_not_end_are_killed() -> None:
    script = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    forked = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
    forked.start()
    end_children([script, forked])
    forked.join(300)
    assert (script.wait(300), forked.exitcode) == (-signal.SIGKILL, -signal.SIGKILL)
