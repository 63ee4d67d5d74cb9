"""Two tiers of one table: a covering choice of its cells runs by default, the rest under the marker `exhaustive`.

`@covering(layout=LAYOUTS, column=COLUMNS)` stands for one `parametrize` over the product of its factors. Of two factors
the default tier has every value of each; of three or more it has every pair of values of any two of them.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from zlib import crc32

import pytest

Test = Callable[..., Any]
Cell = tuple[int, ...]  # for each factor, the number of its value


def covering(keep: int | None = None, first: int | None = None, **factors: Iterable[Any]) -> Callable[[Test], Test]:
    """Marks the cells that a covering choice can do without; in ids, values look as `parametrize` shows them.

    Args:
        keep: where a cell takes long, only so many of the covering choice run by default, and of each test others.
        first: the first of these, where the others take too long.
        factors: the values of each.
    """
    values = [list(choices) for choices in factors.values()]
    sizes = [len(choices) for choices in values]

    def mark(test: Test) -> Test:
        chosen = cover(sizes, min(2, len(sizes) - 1))
        start = first_of(test, len(chosen)) if keep is not None and first is None else first or 0
        default = set([*chosen[start:], *chosen[:start]][:keep])
        rows = []
        for cell in itertools.product(*map(range, sizes)):
            marks = () if cell in default else (pytest.mark.exhaustive,)
            rows.append(pytest.param(*(choices[k] for choices, k in zip(values, cell, strict=True)), marks=marks))
        return pytest.mark.parametrize(tuple(factors), rows)(test)

    return mark


def sampled(
    keep: int, names: Any, values: Iterable[Any], ids: Sequence[str] | Callable[[Any], str] | None = None
) -> Callable[[Test], Test]:
    """Stands for `parametrize`: so many of the values run by default, spread evenly over them; of one each another."""
    given = list(values)

    def mark(test: Test) -> Test:
        spread = {round(k * (len(given) - 1) / max(keep - 1, 1)) for k in range(min(keep, len(given)))}
        places = spread if keep > 1 else {first_of(test, len(given))}
        rows = []
        for number, value in enumerate(given):
            row = value if isinstance(value, tuple) and not isinstance(names, str) else (value,)
            marks = () if number in places else (pytest.mark.exhaustive,)
            named = None if ids is None or callable(ids) else ids[number]
            rows.append(pytest.param(*row, marks=marks, id=named))
        return pytest.mark.parametrize(names, rows, ids=ids if callable(ids) else None)(test)

    return mark


def first_of(test: Test, cells: int) -> int:
    """Where a test begins that runs few of its cells: each test elsewhere, so that together they have all layouts."""
    return crc32(test.__name__.encode()) % cells


def cover(sizes: Sequence[int], strength: int) -> list[Cell]:
    """Some cells in which every combination of `strength` values is found: greedily the most new ones first.

    Among equals that cell is taken whose values were taken least often, so that values meet different partners.
    """
    cells = list(itertools.product(*map(range, sizes)))
    missing = {part for cell in cells for part in parts(cell, strength)}
    taken: Counter[tuple[int, int]] = Counter()
    chosen = []
    while missing:
        cell = max(cells, key=lambda cell: (len(missing & parts(cell, strength)), -used(cell, taken)))
        chosen.append(cell)
        missing -= parts(cell, strength)
        taken.update(enumerate(cell))
    return chosen


def parts(cell: Cell, strength: int) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(cell), strength))


def used(cell: Cell, taken: Counter[tuple[int, int]]) -> int:
    return sum(taken[value] for value in enumerate(cell))
