"""Runs of which a rank is killed (-9) at some touch of the disk, again and again, until they end.

After each kill there is a valid checkpoint, none is torn, and none that a run had committed is lost; the run that goes
on ends with the weights of one that nobody killed, bit for bit.
"""

import os
import random
import signal
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_parallel import ExpertParallelStrategy, PipelineParallel, TensorParallel, Zero
from lightning_parallel.strategies.checkpoint.saver import Save
from tests.checkpoint.folders import content, is_step, load, save
from tests.checkpoint.test_commit import die_at
from tests.curves import compare_weights
from tests.layouts import Layout, hybrid, layouts
from tests.models import build, loaders
from tests.ranks import POOL, free_port
from tests.strategies.checkpoint.saves import valid_in
from tests.trainers import trainer

pytestmark = pytest.mark.launched


def saves(rank: int, meeting: Path, target: Path, killed: int, number: int) -> None:
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=limit)
    assert dist.group.WORLD is not None
    part = Save(content(2), target, {}, {}, {}, dist.group.WORLD, copies=False)
    if rank == killed:
        die_at(number)
    part.run(dist.group.WORLD)
    os._exit(0)


def ends(function: Callable[..., None], *calls: tuple[Any, ...]) -> list[int | None]:
    """The exit codes of processes, one for each call; nobody waits for one that is dead."""
    context = get_context("forkserver")
    ranks = [context.Process(target=function, args=call) for call in calls]
    for each in ranks:
        each.start()
    try:
        wait([each.sentinel for each in ranks], 300)  # until one has ended: where much runs beside, they begin slowly
        for each in ranks:
            each.join(90)
        assert all(each.exitcode is not None for each in ranks), "a rank waits for one that is dead"
        return [each.exitcode for each in ranks]
    finally:
        for each in ranks:
            each.kill()


@pytest.mark.parametrize(
    ("rank", "first", "step"), [(0, 5, 15), *(pytest.param(k, 1, 1, marks=pytest.mark.exhaustive) for k in range(2))]
)
def test_rank_is_killed_while_all_save(rank: int, first: int, step: int, tmp_path: Path) -> None:
    POOL.warm_up()
    target, found = tmp_path / "last.ckpt", set()
    for number in range(first, 500, step):
        save(target, 1)
        # a name of this cell alone: a rank that finds the address of another cell's dead rank there waits for it
        arguments = (tmp_path.with_name(f"{tmp_path.name}-meeting-{number}"), target, rank, number)
        lived = ends(saves, (0, *arguments), (1, *arguments)) == [0, 0]
        got = load(target)
        found.add(got["global_step"])
        assert is_step(got, got["global_step"])
        if lived:
            break
    assert {1, 2} == found
    assert number > 1
    save(target, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


COLUMNS = {"expert parallel": "moe"}
LAYOUTS = layouts("zero 3", "data parallel", "tensor parallel", "pipeline", "context") | {
    "expert parallel": Layout(2, 2, partial(ExpertParallelStrategy, 2)),
    "eight ranks": Layout(8, 2, hybrid(PipelineParallel(2), TensorParallel(2), Zero(2, stage=2))),
}
FORMS = {
    "sharded": {"checkpoint": "sharded"},
    "full": {"checkpoint": "full"},
    "in the background": {"checkpoint": "sharded", "async_save": True},
}
STEPS, KILLS = 6, 10


class Dies(Callback):
    """Notes before each batch how many steps there have been, of which the last one has been saved; dies on one rank.

    At a touch of the disk, counted from the first batch on.
    """

    def __init__(self, path: Path, rank: int, touch: int) -> None:
        self.path, self.rank, self.touch = path, rank, touch

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == self.rank:
            die_at(self.touch)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(f"{trainer.global_step}\n")


def trains(layout: str, form: str, folder: Path, port: int, dies: tuple[int, int], rank: int) -> None:
    """One rank of a run that goes on by itself, saves after every step, and leaves its weights as `result`."""
    (ranks, readers, strategy), column = LAYOUTS[layout], COLUMNS.get(layout, "gpt")
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        model = build(column, n_layers=2)
        often = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=1, save_top_k=1)
        saving = {"callbacks": [often, Dies(folder / "progress", *dies)], "enable_checkpointing": True}
        run = trainer(strategy(resume="auto", **FORMS[form]), max_epochs=STEPS // 2, **saving)
        run.fit(model, loaders(column, 8 // readers, samples=16, shuffle=True).train)
        if rank == 0:
            torch.save(model.state_dict(), folder / "result.new")
            (folder / "result.new").rename(folder / "result")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run(layout: str, form: str, folder: Path, dies: tuple[int, int]) -> bool:
    """Whether a rank was killed; all end, and well where none was."""
    folder.mkdir(exist_ok=True)
    port, ranks = free_port(), range(LAYOUTS[layout].ranks)
    codes = ends(trains, *((layout, form, folder, port, dies, rank) for rank in ranks))
    killed = dies[0] in ranks and codes[dies[0]] == -signal.SIGKILL
    assert killed or set(codes) == {0}, "a run that nobody kills fails"
    return killed


def steps_of(folder: Path) -> list[int]:
    progress = folder / "progress"
    return [int(line) for line in progress.read_text().splitlines()] if progress.exists() else []


def require_checkpoint(form: str, folder: Path) -> None:
    """None is torn, and what was saved by the last step that began is there, or a newer one."""
    late = 1 if form == "in the background" else 0  # then one is committed by the next save
    saved = max(steps_of(folder), default=0) - late
    found = [int(name.removeprefix("step=").removesuffix(".ckpt")) for name in valid_in(folder / "saved")]
    assert max(found, default=0) >= saved


NOBODY = (-1, 0)
CELLS = [(layout, list(FORMS)[k % 3]) for k, layout in enumerate(LAYOUTS)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "form"), [*CELLS, ("zero 3", "full"), ("zero 3", "in the background")])
def test_rank_is_killed_again_and_again_in_a_run(layout: str, form: str, tmp_path: Path) -> None:
    POOL.warm_up()
    chance, most, kills, runs = random.Random(f"{layout} {form}"), 400, 0, 0
    run(layout, form, tmp_path / "whole", NOBODY)
    while kills < KILLS:
        folder = tmp_path / str(runs)
        while not (folder / "result").exists():
            victim = chance.randrange(LAYOUTS[layout].ranks)
            dies = NOBODY if kills >= KILLS else (victim, chance.randint(1, most))
            if run(layout, form, folder, dies):
                kills += 1
            else:
                most = max(10, most // 2)  # so often was the disk not touched
            require_checkpoint(form, folder)
        expected, found = (torch.load(each / "result", weights_only=True) for each in (tmp_path / "whole", folder))
        compare_weights(expected, found, 0.0, f"after {steps_of(folder)}: ")
        runs += 1
