"""Ranks that do not come to a collective are named, with the place where they stand, before the backend gives up."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from lightning.pytorch import LightningModule

from lightning_parallel import ZeroStrategy
from lightning_parallel.strategies.ranks.watchdog import RankPosition, ranks_behind, summary
from tests.ranks import run_on_ranks
from tests.strategies.faults.regression import LAYOUTS, Regression, loader
from tests.tiers import sampled
from tests.trainers import trainer

SHORT = timedelta(seconds=4)


def told(module: LightningModule) -> str:
    watchdog = module.trainer.strategy._watchdog
    assert watchdog is not None
    return str(watchdog.report)


def lingers(ranks: list[int], module: LightningModule) -> None:
    """Until the others have noticed, as a loader does whose disk is gone."""
    while module.global_rank in ranks and not told(module):
        time.sleep(0.01)


def trained(make: Callable[..., Any], module: LightningModule) -> tuple[str, str]:
    """What the watchdog reported in a run, and what it says of a hang at its end."""
    fitting = trainer(make(timeout=SHORT), max_steps=3)
    fitting.fit(module, loader())
    return str(fitting.strategy._watchdog.report), str(fitting.strategy._watchdog.hang_summary())


@sampled(1, "layout", ["zero 3", "tensor parallel", "pipeline"])
def test_rank_that_does_not_come_is_named(layout: str) -> None:
    """Of a hang that is over there is no summary."""
    module = Regression("training_step", partial(lingers, [1]))
    for rank, (said, summary_at_end) in enumerate(run_on_ranks(2, trained, LAYOUTS[layout].strategy, module)):
        assert summary_at_end == ""
        head, *places = said.splitlines()
        assert head.startswith("rank 1 is behind: it is in lingers (test_watchdog.py:")
        assert places[0].startswith("  rank 1 is in lingers (test_watchdog.py:")
        assert " of step 1 for " in places[0]
        assert "in training_step" in places[0]
        assert (len(places), places[-1].startswith(f"  rank {rank} ")) == (2 - rank, True)
        assert rank == 1 or places[-1].startswith("  rank 0 waits in ")


def read_by_one(module: LightningModule) -> None:
    """Gathers a parameter on one rank, to which the other comes only when the watchdog has spoken; then all fail."""
    lingers([1], module)
    float(next(module.parameters()).detach()[0].sum())
    raise ValueError("a user's mistake")


def failed() -> tuple[str, list[str]]:
    fitting = trainer(ZeroStrategy(timeout=SHORT), max_steps=3)
    with pytest.raises(ValueError, match="a user's mistake") as error:
        fitting.fit(Regression("on_train_batch_end", read_by_one), loader())
    return str(fitting.strategy._watchdog.report), list(error.value.__notes__)  # type: ignore[attr-defined]


def test_hook_that_reads_a_shard_on_one_rank_is_named() -> None:
    """Errors that follow say who was waited for."""
    found = run_on_ranks(2, failed)
    assert re.search(r"rank 0 waits in .*(\n.*)*test_watchdog.py:\d+ in read_by_one", found[0][0]), found
    for _, (note, *_) in found:
        assert note.startswith("rank 1 is behind: it is in lingers (")


HERE = RankPosition(waits=True, step=3, function="all_reduce", stack=[], begun={"world": 4, "dp": 2})


def test_ranks_behind() -> None:
    """Silent or busy ones, or those that began fewer collectives than any other; none where each left out another."""
    busy, fewer = HERE._replace(waits=False), HERE._replace(begun={"world": 3})
    left_out = HERE._replace(begun={"world": 3, "dp": 3})
    for places, behind in [
        ([HERE, None, HERE], [1]),
        ([HERE, busy, HERE], [1]),
        ([HERE, fewer, HERE], [1]),
        ([HERE, fewer, fewer._replace(waits=False)], [2]),
        ([HERE, HERE._replace(begun={"tp": 1}), HERE], []),
        ([HERE, HERE, left_out], [2]),
        ([HERE, left_out, HERE._replace(begun={"world": 3, "dp": 2})], []),
        ([busy] * 3, []),
    ]:
        assert ranks_behind({rank: place for rank, place in enumerate(places) if place is not None}, 3) == behind


READS = RankPosition(waits=False, step=2, function="read (train.py:7)", stack=["train.py:70", "train.py:7"], begun={})
WAITS = HERE._replace(stack=["train.py:70"], seconds=3.0)
ELSEWHERE = WAITS._replace(function="barrier", stack=["train.py:8"])
LINES = {
    "ranks 0, 2 are behind: rank 0 is in read (train.py:7) of step 2, at train.py:7; "
    "the others wait in all_reduce of step 3": ({0: READS, 1: WAITS, 2: READS}, [0, 2]),
    "rank 1 is behind: it does not answer: it is stopped, or has ended; the others wait in all_reduce of step 3": (
        {0: WAITS},
        [1],
    ),
    "rank 1 is behind: it waits in barrier of step 3, at train.py:8; the others wait in all_reduce of step 3, at "
    "train.py:70; read tensors on all ranks, not under a condition on the rank": ({0: WAITS, 1: ELSEWHERE}, [1]),
    "none is behind: all ranks wait in all_reduce of step 3": ({0: WAITS, 1: WAITS}, []),
    "ranks wait for each other, as some skipped a collective: rank 0 waits in all_reduce of step 3, at train.py:70; "
    "rank 1 waits in barrier of step 3, at train.py:8": ({0: WAITS, 1: ELSEWHERE}, []),
}


@pytest.mark.parametrize("line", LINES)
def test_ranks_behind_are_told_in_one_line(line: str) -> None:
    assert summary(*LINES[line]) == line
