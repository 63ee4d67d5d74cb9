"""One of two ranks is killed (-9) at any touch of the disk while both save: what was there is whole, or the new one."""

import os
import sys
import tempfile
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_parallel.strategies.checkpoint.saver import Source, prepared
from tests.checkpoint.folders import content, is_step, load, save
from tests.checkpoint.test_commit import TOUCHES
from tests.ranks import POOL

RANKS = 2


def saves(rank: int, meeting: str, target: Path, killed: int, number: int) -> None:
    wait = timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=wait)
    assert dist.group.WORLD is not None
    part = prepared(content(2), target, Source({}, {}), dist.group.WORLD, copies=False)
    if rank == killed:
        die_at(number)
    part.run(dist.group.WORLD)
    os._exit(0)


def die_at(number: int) -> None:
    touched = 0

    def count(event: str, _: Any) -> None:
        nonlocal touched
        touched += event.startswith(TOUCHES)
        if touched == number and event.startswith(TOUCHES):
            os.kill(os.getpid(), 9)

    sys.addaudithook(count)


def kill(target: Path, rank: int, number: int) -> bool:
    """Whether all lived to the end, because the killed rank touches the disk less often."""
    context = get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/meeting", target, rank, number)
        ranks = [context.Process(target=saves, args=(each, *arguments)) for each in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(40)
        assert all(each.exitcode is not None for each in ranks), "a rank waits for one that is dead"
        return all(each.exitcode == 0 for each in ranks)


def sweep(tmp_path: Path, rank: int, first: int, step: int) -> int:
    """Kills at every `step`-th touch, from the `first` one on; returns the number of kills."""
    POOL.warm_up()
    target, found = tmp_path / "last.ckpt", set()
    for number in range(first, 500, step):
        save(target, 1)
        lived = kill(target, rank, number)
        got = load(target)
        found.add(got["global_step"])
        assert is_step(got, got["global_step"])
        if lived:
            break
    assert 1 in found
    assert 2 in found
    save(target, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    return number // step


@pytest.mark.parametrize(("rank", "first", "step"), [(0, 5, 15), (1, 1, 4)])
def test_a_rank_is_killed_while_all_save(rank: int, first: int, step: int, tmp_path: Path) -> None:
    assert sweep(tmp_path, rank, first, step) >= 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_is_killed_at_every_touch(rank: int, tmp_path: Path) -> None:
    assert sweep(tmp_path, rank, 1, 1) >= 2
