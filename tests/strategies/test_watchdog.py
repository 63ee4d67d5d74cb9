"""Ranks that do not come to a collective are named, with the place where they stand, before the backend gives up."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_parallel import DataParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy, ZeroStrategy
from lightning_parallel.strategies.ranks.watchdog import Place, ranks_behind, summary
from tests.ranks import run_on_ranks
from tests.strategies.test_failures import Regression, loader
from tests.tiers import sampled
from tests.trainers import trainer

LAYOUTS: dict[str, Callable[..., Any]] = {
    "data_parallel": DataParallelStrategy,
    "zero_3": ZeroStrategy,
    "tensor": TensorParallelStrategy,
    "pipeline": partial(PipelineParallelStrategy, microbatches=2),
}
SHORT = timedelta(seconds=4)


def told(module: LightningModule) -> str:
    watchdog = module.trainer.strategy._watchdog
    assert watchdog is not None
    return str(watchdog.report)


def lingers(ranks: list[int], module: LightningModule) -> None:
    """Until the others have noticed, as a loader does whose disk is gone."""
    while module.global_rank in ranks and not told(module):
        time.sleep(0.01)


def trained(make: Callable[..., Any], event: Callable[[LightningModule], None]) -> str:
    module = Regression("training_step", event)
    fitting = trainer(make(timeout=SHORT), max_steps=3)
    fitting.fit(module, loader())
    return str(fitting.strategy._watchdog.report)


@sampled(1, "layout", LAYOUTS)
def test_a_rank_that_does_not_come_is_named(layout: str) -> None:
    ends = run_on_ranks(2, trained, LAYOUTS[layout], partial(lingers, [1]))
    for rank, said in enumerate(ends):
        head, *places = said.splitlines()
        assert head.startswith("rank 1 is behind: it is in lingers (test_watchdog.py:")
        assert places[0].startswith("  rank 1 is in lingers (test_watchdog.py:")
        assert " of step 1 for " in places[0]
        assert "in training_step" in places[0]
        assert (len(places), places[-1].startswith(f"  rank {rank} ")) == (2 - rank, True)
        assert rank == 1 or places[-1].startswith("  rank 0 waits in ")


def all_linger(module: LightningModule) -> None:
    """In the first step, until one has asked where the others are, and all have answered; later nobody asks."""
    watchdog = module.trainer.strategy._watchdog
    if module.global_step:
        return
    answered, tell = threading.Event(), watchdog._tell

    def telling(places: Any) -> None:
        tell(places)
        watchdog._patience = math.inf
        answered.set()

    with mock.patch.object(watchdog, "_tell", telling):
        dist.barrier()
        answered.wait()


def test_ranks_that_all_take_long_are_left_alone() -> None:
    assert run_on_ranks(2, trained, DataParallelStrategy, all_linger) == ["", ""]


class Fails(Regression):
    """After one rank did not come for a while, all fail."""

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            raise ValueError("a user's mistake")


def failed() -> list[str]:
    fitting = trainer(DataParallelStrategy(timeout=SHORT), max_steps=3)
    with pytest.raises(ValueError, match="a user's mistake") as error:
        fitting.fit(Fails("training_step", partial(lingers, [1])), loader())
    return list(error.value.__notes__)


def test_errors_that_follow_say_who_was_waited_for() -> None:
    for said, *_ in run_on_ranks(2, failed):
        assert said.startswith("rank 1 is behind: it is in lingers (")


def read_by_one(module: LightningModule) -> None:
    """Gathers a parameter on one rank, to which the other comes only when the watchdog has spoken."""
    lingers([1], module)
    float(next(module.parameters()).detach()[0].sum())


def reading() -> str:
    fitting = trainer(ZeroStrategy(timeout=SHORT), max_steps=3)
    fitting.fit(Regression("on_train_batch_end", read_by_one), loader())
    return str(fitting.strategy._watchdog.report)


def test_hook_that_reads_a_shard_on_one_rank_is_named() -> None:
    said, _ = run_on_ranks(2, reading)
    assert re.search(r"rank 0 waits in .*(\n.*)*test_watchdog.py:\d+ in read_by_one", said), said


HERE = Place(waits=True, step=3, function="all_reduce", stack=[], begun={"world": 4, "dp": 2})


@pytest.mark.parametrize(
    ("places", "behind"),
    [
        ([HERE, None, HERE], [1]),
        ([HERE, HERE._replace(waits=False), HERE], [1]),
        ([HERE, HERE._replace(begun={"world": 3}), HERE], [1]),
        ([HERE, HERE._replace(begun={"world": 3}), HERE._replace(begun={"world": 3}, waits=False)], [2]),
        ([HERE, HERE._replace(begun={"tp": 1}), HERE], []),
        ([HERE, HERE, HERE._replace(begun={"world": 3, "dp": 3})], [2]),
        ([HERE, HERE._replace(begun={"world": 3, "dp": 3}), HERE._replace(begun={"world": 3, "dp": 2})], []),
        ([HERE._replace(waits=False)] * 3, []),
    ],
    ids=["silent", "busy", "fewer", "fewer and busy", "other groups", "one left out", "each another", "all busy"],
)
def test_who_is_behind(places: list[Place | None], behind: list[int]) -> None:
    assert ranks_behind({rank: place for rank, place in enumerate(places) if place is not None}, 3) == behind


READS = Place(waits=False, step=2, function="read (train.py:7)", stack=["train.py:70", "train.py:7"], begun={})
WAITS = HERE._replace(stack=["train.py:70"], seconds=3.0)
LINES = {
    "rank 1 is behind: it is in read (train.py:7) of step 2, at train.py:7; the others wait in all_reduce of step 3": (
        {0: WAITS, 1: READS},
        [1],
    ),
    "ranks 0, 2 are behind: rank 0 is in read (train.py:7) of step 2, at train.py:7; "
    "the others wait in all_reduce of step 3": ({0: READS, 1: WAITS, 2: READS}, [0, 2]),
    "rank 1 is behind: it says nothing: it is stopped, or has ended; the others wait in all_reduce of step 3": (
        {0: WAITS},
        [1],
    ),
    "rank 1 is behind: it waits in barrier of step 3, at train.py:8; the others wait in all_reduce of step 3, at "
    "train.py:70; read tensors on all ranks, not under a condition on the rank": (
        {0: WAITS, 1: WAITS._replace(function="barrier", stack=["train.py:8"])},
        [1],
    ),
    "none is behind: all ranks wait in all_reduce of step 3": ({0: WAITS, 1: WAITS}, []),
    "ranks wait for each other, for some left a collective out: rank 0 waits in all_reduce of step 3, at train.py:70; "
    "rank 1 waits in barrier of step 3, at train.py:70": ({0: WAITS, 1: WAITS._replace(function="barrier")}, []),
}


@pytest.mark.parametrize("line", LINES)
def test_who_is_behind_in_one_line(line: str) -> None:
    assert summary(*LINES[line]) == line


def has_gone_on() -> str:
    fitting = trainer(DataParallelStrategy(timeout=SHORT), max_steps=3)
    fitting.fit(Regression("training_step", partial(lingers, [1])), loader())
    return str(fitting.strategy._watchdog.hang_summary())


def test_of_a_hang_that_is_over_there_is_no_summary() -> None:
    assert run_on_ranks(2, has_gone_on) == ["", ""]
