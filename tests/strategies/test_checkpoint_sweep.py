"""Runs of which a rank is killed (-9) at random moments of training and saving, again and again, until they end.

After each kill there is a valid checkpoint, none is torn, and none that a run had committed is lost; the run that goes
on ends with the weights of one that nobody killed, bit for bit.
"""

import os
import random
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_parallel import (
    ContextParallelStrategy,
    DataParallelStrategy,
    ExpertParallelStrategy,
    HybridStrategy,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from tests.curves import compare_weights
from tests.models import build, loaders
from tests.ranks import POOL, free_port
from tests.strategies.test_checkpoint_faults import valid_in
from tests.trainers import trainer

pytestmark = pytest.mark.launched


class Layout(NamedTuple):
    ranks: int
    readers: int
    strategy: Callable[..., Any]
    column: str = "gpt"


EIGHT = (PipelineParallel(2), TensorParallel(2), Zero(2, stage=2))
LAYOUTS = {
    "zero 3": Layout(2, 2, partial(ZeroStrategy, 2)),
    "data parallel": Layout(2, 2, partial(DataParallelStrategy, 2)),
    "tensor parallel": Layout(2, 1, partial(TensorParallelStrategy, 2)),
    "pipeline": Layout(2, 1, partial(PipelineParallelStrategy, 2)),
    "context parallel": Layout(2, 1, partial(ContextParallelStrategy, 2)),
    "expert parallel": Layout(2, 2, partial(ExpertParallelStrategy, 2), "moe"),
    "eight ranks": Layout(8, 2, partial(HybridStrategy, *EIGHT)),
}
FORMS = {
    "sharded": {"checkpoint": "sharded"},
    "full": {"checkpoint": "full"},
    "in the background": {"checkpoint": "sharded", "async_save": True},
}
STEPS = 6


class Progress(Callback):
    """Notes before each batch how many steps there have been, of which the last one has been saved."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(f"{trainer.global_step}\n")


def trains(layout: str, form: str, folder: Path, port: int, rank: int) -> None:
    """One rank of a run that goes on by itself and saves after every step."""
    ranks, readers, strategy, column = LAYOUTS[layout]
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        model = build(column, n_layers=2)
        often = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=1, save_top_k=1)
        run = trainer(
            strategy(resume="auto", **FORMS[form]),
            callbacks=[often, Progress(folder / "progress")],
            enable_checkpointing=True,
            max_epochs=STEPS // 2,
        )
        run.fit(model, loaders(column, 8 // readers, samples=16, shuffle=True).train)
        if rank == 0:
            torch.save(model.state_dict(), folder / "result.new")
            (folder / "result.new").rename(folder / "result")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def started(layout: str, form: str, folder: Path) -> list[BaseProcess]:
    port, context = free_port(), get_context("forkserver")
    made = [context.Process(target=trains, args=(layout, form, folder, port, k)) for k in range(LAYOUTS[layout].ranks)]
    for process in made:
        process.start()
    return made


def steps_of(folder: Path) -> list[int]:
    progress = folder / "progress"
    return [int(line) for line in progress.read_text().splitlines()] if progress.exists() else []


def wait_until_it_trains(ranks: list[BaseProcess], folder: Path, before: int) -> None:
    deadline = time.monotonic() + 120
    while len(steps_of(folder)) == before and all(each.exitcode is None for each in ranks):
        assert time.monotonic() < deadline, "it does not begin"
        time.sleep(0.01)


def require_ended(ranks: list[BaseProcess]) -> None:
    """Nobody waits for one that is dead."""
    try:
        for each in ranks:
            each.join(60)
        assert all(each.exitcode is not None for each in ranks), "a rank waits for one that is dead"
    finally:
        for each in ranks:
            each.kill()


def require_trained(ranks: list[BaseProcess]) -> None:
    require_ended(ranks)
    assert [each.exitcode for each in ranks] == [0] * len(ranks), "a run that nobody kills fails"


def uninterrupted(layout: str, form: str, folder: Path) -> tuple[dict[str, Tensor], float]:
    """The weights of a run that nobody kills, and how long it trains."""
    folder.mkdir()
    ranks = started(layout, form, folder)
    wait_until_it_trains(ranks, folder, 0)
    start = time.monotonic()
    require_trained(ranks)
    return torch.load(folder / "result", weights_only=True), time.monotonic() - start


def killed(layout: str, form: str, folder: Path, chance: random.Random, seconds: float) -> bool:
    """Goes on, and kills one rank at some moment; False if the run ended before."""
    ranks = started(layout, form, folder)
    wait_until_it_trains(ranks, folder, len(steps_of(folder)))
    time.sleep(chance.uniform(0, seconds))
    victim = chance.choice(ranks)
    lived = victim.exitcode is not None
    if not lived:
        os.kill(victim.pid, signal.SIGKILL)
    require_ended(ranks)
    if lived or victim.exitcode != -signal.SIGKILL:
        require_trained(ranks)
        return False
    return True


def require_checkpoint(form: str, folder: Path) -> None:
    """None is torn, and what was saved by the last step that began is there, or a newer one."""
    late = 1 if form == "in the background" else 0  # then one is committed by the next save
    saved = max(steps_of(folder), default=0) - late
    found = [int(name.removeprefix("step=").removesuffix(".ckpt")) for name in valid_in(folder / "saved")]
    assert max(found, default=0) >= saved


def sweep(layout: str, form: str, where: Path, kills: int) -> None:
    POOL.warm_up()
    chance = random.Random(f"{layout} {form}")
    expected, seconds = uninterrupted(layout, form, where / "whole")
    done = runs = 0
    while done < kills:
        (folder := where / str(runs)).mkdir()
        while not (folder / "result").exists():
            if done >= kills:
                require_trained(started(layout, form, folder))
            elif killed(layout, form, folder, chance, seconds):
                done += 1
            else:
                seconds /= 2  # it trained for a shorter time than the first run, beside which others may have run
            require_checkpoint(form, folder)
        found, runs = torch.load(folder / "result", weights_only=True), runs + 1
        compare_weights(expected, found, 0.0, f"after {steps_of(folder)}: ")


@pytest.mark.exhaustive
def test_rank_is_killed_at_random_moments(tmp_path: Path) -> None:
    sweep("zero 3", "sharded", tmp_path, kills=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_are_killed_at_two_hundred_random_moments(layout: str, form: str, tmp_path: Path) -> None:
    """Ten in each cell."""
    sweep(layout, form, tmp_path, kills=10)
