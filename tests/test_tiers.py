import itertools
from functools import partial

import pytest

from tests.tiers import cover, covering, rows_covering, sampled


@pytest.mark.parametrize("sizes", [(4, 4), (8, 4), (1, 3), (2, 3, 4), (7, 4, 3), (2, 2, 2, 2)], ids=str)
def test_pairs_of_factors_are_covered(sizes):
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
    (mark,) = covering(layout=["one", "two"], column={"a": 1, "b": 2})(named("test")).pytestmark
    rows = mark.args[1]
    assert {row.values for row in rows} == set(itertools.product(["one", "two"], "ab"))
    assert [[mark.name for mark in row.marks] for row in rows] == [[], ["exhaustive"], ["exhaustive"], []]


def test_rows_cover_every_value():
    given = [("a", 1), ("a", 2), ("b", 2), ("b", 3)]
    (mark,) = rows_covering(("letter", "number"), given)(named("test")).pytestmark
    assert [row.values for row in mark.args[1]] == given
    assert [bool(row.marks) for row in mark.args[1]] == [False, True, False, False]


def named(name):
    def test():
        pass

    test.__name__ = name
    return test


@pytest.mark.parametrize(
    "choose", [partial(sampled, 1, "value"), lambda values: covering(keep=1, value=values, other="x")]
)
def test_tests_that_run_one_cell_run_different_ones(choose):
    ran = set()
    for number in range(20):
        (mark,) = choose(range(4))(named(f"test_{number}")).pytestmark
        (row,) = [row for row in mark.args[1] if not row.marks]
        ran.add(row.values[0])
    assert ran == {0, 1, 2, 3}
