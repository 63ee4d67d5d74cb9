import itertools
from functools import partial

import pytest

from tests.tiers import cover, covering, sampled


def rows(choose, name="test"):
    """The values of each row, and whether it runs by default."""

    def test():
        pass

    test.__name__ = name
    (mark,) = choose(test).pytestmark
    return {row.values: not row.marks for row in mark.args[1]}


@pytest.mark.parametrize("sizes", [(8, 4), (1, 3), (7, 4, 3), (2, 2, 2, 2)], ids=str)
def test_pairs_of_factors_are_covered_by_few_cells(sizes):
    strength = min(2, len(sizes) - 1)
    chosen = cover(sizes, strength)
    for factors in itertools.combinations(range(len(sizes)), strength):
        wanted = set(itertools.product(*(range(sizes[factor]) for factor in factors)))
        assert {tuple(cell[factor] for factor in factors) for cell in chosen} == wanted
    assert chosen == cover(sizes, strength)
    assert len(chosen) <= {(8, 4): 8, (1, 3): 3, (7, 4, 3): 32, (2, 2, 2, 2): 8}[sizes]


def test_no_cell_is_lost():
    product = rows(covering(layout=["one", "two"], column={"a": 1, "b": 2}))
    assert product == {("one", "a"): True, ("one", "b"): False, ("two", "a"): False, ("two", "b"): True}


@pytest.mark.parametrize(
    "choose", [partial(sampled, 1, "value"), lambda values: covering(keep=1, value=values, other="x")]
)
def test_tests_that_run_one_cell_run_different_ones(choose):
    runs = [rows(choose(range(4)), f"test_{number}") for number in range(20)]
    assert {values[0] for run in runs for values, default in run.items() if default} == {0, 1, 2, 3}
