import itertools

import pytest

from tests.tiers import cover, covering


@pytest.mark.parametrize("sizes", [(4, 4), (8, 4), (1, 3), (2, 3, 4), (7, 4, 3), (2, 2, 2, 2)], ids=str)
def test_every_pair_is_covered_of_three_factors_and_every_value_of_two(sizes):
    strength = min(2, len(sizes) - 1)
    chosen = cover(sizes, strength)
    for factors in itertools.combinations(range(len(sizes)), strength):
        wanted = set(itertools.product(*(range(sizes[factor]) for factor in factors)))
        assert {tuple(cell[factor] for factor in factors) for cell in chosen} == wanted


def test_few_cells_are_enough_and_they_are_the_same_every_time():
    assert cover((8, 4), 1) == cover((8, 4), 1)
    assert len(cover((8, 4), 1)) == 8
    assert len(cover((7, 4, 3), 2)) <= 32 < 7 * 4 * 3
    assert cover((4, 4), 1) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_no_cell_is_lost():
    rows = covering(layout=["one", "two"], column={"a": 1, "b": 2}).args[1]
    assert {row.values for row in rows} == set(itertools.product(["one", "two"], "ab"))
    assert [[mark.name for mark in row.marks] for row in rows] == [[], ["exhaustive"], ["exhaustive"], []]
