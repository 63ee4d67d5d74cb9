"""Blocks are divided as well as can be: held to every possible division of few blocks."""

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest

from lightning_parallel.techniques.pipeline_parallel.balance import balanced


def divisions(blocks: int, stages: int) -> Iterator[list[range]]:
    for cuts in combinations(range(1, blocks), stages - 1):
        bounds = (0, *cuts, blocks)
        yield [range(start, stop) for start, stop in pairwise(bounds)]


def slowest(stages: list[range], costs: list[int], first: int, last: int) -> int:
    times = [sum(costs[i] for i in stage) for stage in stages]
    times[0] += first
    times[-1] += last
    return max(times)


@pytest.mark.parametrize("seed", range(40))
def test_no_division_is_better(seed: int) -> None:
    draw = random.Random(seed)
    costs = [draw.randint(0, 6) for _ in range(draw.randint(1, 9))]
    stages, first, last = draw.randint(1, len(costs)), draw.randint(0, 9), draw.randint(0, 9)
    got = balanced(costs, stages, first, last)
    every = list(divisions(len(costs), stages))
    best = min(slowest(division, costs, first, last) for division in every)
    ties = [division for division in every if slowest(division, costs, first, last) == best]
    assert got in ties
    assert len(got[-1]) == min(len(division[-1]) for division in ties)


@pytest.mark.parametrize("seed", range(20))
def test_best_division_that_leaves_blocks_together(seed: int) -> None:
    draw = random.Random(seed)
    costs = [draw.randint(0, 6) for _ in range(draw.randint(2, 9))]
    stages, uncut = draw.randint(1, len(costs)), {draw.randint(1, len(costs)) for _ in range(3)}
    got = balanced(costs, stages, uncut=uncut)
    every = list(divisions(len(costs), stages))
    every = [each for each in every if uncut.isdisjoint(stage.start for stage in each)] or every
    best = min(slowest(division, costs, 0, 0) for division in every)
    assert got in [division for division in every if slowest(division, costs, 0, 0) == best]


def test_equal_blocks_are_divided_equally() -> None:
    assert list(map(len, balanced([0.1] * 12, 4))) == [3, 3, 3, 3]
    assert list(map(len, balanced([0.1] * 7, 4))) == [2, 2, 2, 1]


def test_embedding_and_head_take_the_place_of_blocks() -> None:
    assert list(map(len, balanced([1.0] * 12, 4, first_extra=1, last_extra=3))) == [3, 4, 4, 1]


@pytest.mark.parametrize(
    ("costs", "stages", "message"),
    [
        ([1.0] * 3, 4, "3 blocks cannot make 4 stages, each of at least one block; take 1 to 3 stages"),
        ([1.0] * 3, 0, "3 blocks cannot make 0 stages"),
        ([1.0, -2.0], 2, "-2.0 is no cost of a block or stage"),
        ([1.0, float("nan")], 2, "nan is no cost"),
    ],
)
def test_what_cannot_be_divided_is_refused(costs: list[float], stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balanced(costs, stages)
