"""Which of a rank's queries meet which keys: rectangles of scores, and how the order or a mask rules in each.

Example: 2 ranks in zigzag over 8 positions, causal. Rank 0 has the positions 0-1 and 6-7, rank 1 has 2-5:

| | keys 0-1 | 2-5 | 6-7 |
|---|---|---|---|
| queries 0-1 | diagonal | nothing | nothing |
| 2-5 | all | diagonal | nothing |
| 6-7 | all | all | diagonal |
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

from lightning_parallel.collectives.spans import Runs, Span


class Relation(IntEnum):
    """Which keys the queries of a rectangle meet."""

    NOTHING = 0
    MASKED = 1
    ALL = 2
    DIAGONAL = 3


Table = Sequence[Sequence[Relation]]
"""Relations of runs of queries to runs of keys."""


class Piece(NamedTuple):
    """Queries that meet keys in one call of a kernel."""

    rows: Span
    """Of queries, numbered as this rank has them."""
    keys: Span
    """Numbered as they lie in a block."""
    columns: Span
    """The positions of the keys, where a mask rules."""
    relation: Relation

    @property
    def pairs(self) -> int:
        """How many scores are computed."""
        rows, keys = (stop - start for start, stop in (self.rows, self.keys))
        return rows * (rows + 1) // 2 if self.relation == Relation.DIAGONAL else rows * keys


class Block(NamedTuple):
    """A rank's queries and some keys, as many as are needed."""

    spans: tuple[Span, ...]
    """Of the keys that are needed, numbered as their owner has them."""
    length: int
    """How many keys that are."""
    pieces: tuple[Piece, ...]


def causal(queries: Runs, keys: Sequence[Span]) -> Table:
    """The relations of positions where each meets earlier ones and itself. Runs are the same or have none in common."""
    return [[_in_order(query, key) for key in keys] for query in queries]


def _in_order(query: Span, key: Span) -> Relation:
    if query == key:
        return Relation.DIAGONAL
    assert query[1] <= key[0] or key[1] <= query[0], "runs of different ranks have no position in common"
    return Relation.ALL if key[0] < query[0] else Relation.NOTHING


def full(queries: Runs, keys: Sequence[Span]) -> Table:
    """The relations where each position meets all."""
    return [[Relation.ALL] * len(keys) for _ in queries]


def block_of(queries: Runs, keys: Sequence[Span], table: Table) -> Block:
    """The block of a rank's queries and another one's keys, of which those that are needed lie one after the other."""
    needed = [any(row[number] for row in table) for number in range(len(keys))]
    lengths = [stop - start for start, stop in keys]
    places = accumulate((length * need for length, need in zip(lengths, needed, strict=True)), initial=0)
    starts = list(accumulate(lengths, initial=0))
    spans = tuple((starts[n], starts[n + 1]) for n, need in enumerate(needed) if need)
    pieces = _pieces(queries, keys, table, list(places))
    return Block(_touching(spans), sum(stop - start for start, stop in spans), pieces)


def block_of_whole(queries: Runs, keys: Sequence[Span], table: Table) -> Block:
    """The block of a rank's queries and all keys, at their positions.

    Args:
        queries: this rank's positions.
        keys: spans of all positions, ascending.
        table: their relations.
    """
    size = keys[-1][1] if keys else 0
    return Block(((0, size),), size, _pieces(queries, keys, table, [start for start, _ in keys]))


def block_of_one(rows: int, size: int, is_masked: bool) -> Block:
    """The block of a rank's queries and all keys, in one piece."""
    relation = Relation.MASKED if is_masked else Relation.ALL
    pieces = (Piece((0, rows), (0, size), (0, size), relation),) if rows else ()
    return Block(((0, size),), size, pieces)


def _touching(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    found: list[Span] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def _pieces(queries: Runs, keys: Sequence[Span], table: Table, places: Sequence[int]) -> tuple[Piece, ...]:
    """As few pieces as can be: keys that lie side by side, then queries that meet the same keys."""
    found: list[tuple[Span, list[Piece]]] = []
    first = 0
    for (start, stop), relations in zip(queries, table, strict=True):
        rows = first, first + stop - start
        mine = _of_queries(rows, keys, relations, places)
        first = rows[1]
        if found and _alike(found[-1][1], mine):
            rows = found[-1][0][0], rows[1]
            found[-1] = rows, [piece._replace(rows=rows) for piece in mine]
        else:
            found.append((rows, mine))
    return tuple(piece for _, pieces in found for piece in pieces)


def _of_queries(rows: Span, keys: Sequence[Span], relations: Sequence[Relation], places: Sequence[int]) -> list[Piece]:
    found: list[Piece] = []
    for (start, stop), relation, place in zip(keys, relations, places, strict=False):
        if relation == Relation.NOTHING:
            continue
        last = found[-1] if found else None
        if last is not None and _goes_on(last, relation, place, start):
            found[-1] = last._replace(keys=(last.keys[0], place + stop - start), columns=(last.columns[0], stop))
        else:
            found.append(Piece(rows, (place, place + stop - start), (start, stop), relation))
    return found


def _goes_on(last: Piece, relation: Relation, place: int, position: int) -> bool:
    """Whether keys at a place go on where a piece ends; a mask must go on at their positions as well."""
    if last.relation != relation or relation == Relation.DIAGONAL or last.keys[1] != place:
        return False
    return relation == Relation.ALL or last.columns[1] == position


def _alike(one: Sequence[Piece], other: Sequence[Piece]) -> bool:
    if any(piece.relation == Relation.DIAGONAL for piece in one):
        return False
    return [piece[1:] for piece in one] == [piece[1:] for piece in other]
