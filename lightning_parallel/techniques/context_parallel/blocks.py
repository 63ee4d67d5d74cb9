"""Rectangles of attention scores: which queries of a rank meet which keys of another rank.

Example: 2 ranks in zigzag over 8 positions, causal. Rank 0 has the positions 0-1 and 6-7, rank 1 has 2-5:

| | keys 0-1 | 2-5 | 6-7 |
|---|---|---|---|
| queries 0-1 | diagonal | nothing | nothing |
| 2-5 | all | diagonal | nothing |
| 6-7 | all | all | diagonal |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_parallel.collectives.spans import Runs, Span, joined, length_of


class Relation(IntEnum):
    """Which keys the queries of a rectangle meet."""

    NOTHING = 0
    MASKED = 1
    """Those that a mask says."""
    ALL = 2
    DIAGONAL = 3
    """Each query meets the keys up to its own position."""


Table = Sequence[Sequence[Relation]]
"""Relations of runs of queries (rows) to runs of keys (columns)."""


class Piece(NamedTuple):
    """Queries and keys of one kernel call."""

    rows: Span
    """Queries, numbered as this rank stores them."""
    keys: Span
    """Keys, numbered as they lie in the block."""
    columns: Span
    """Positions of the keys in the sequence: columns of a mask."""
    relation: Relation

    @property
    def scores(self) -> int:
        """The number of scores that count."""
        rows, keys = (stop - start for start, stop in (self.rows, self.keys))
        return rows * (rows + 1) // 2 if self.relation == Relation.DIAGONAL else rows * keys


class Block(NamedTuple):
    """A rank's queries and the keys of one rank that they meet."""

    spans: Runs
    """The keys that are needed, numbered as their owner stores them."""
    length: int
    """Number of these keys."""
    pieces: tuple[Piece, ...]


def causal_table(queries: Runs, keys: Runs) -> Table:
    """Relations where each position meets earlier ones and itself. Runs are equal or disjoint."""
    after = Relation.ALL, Relation.NOTHING
    return [[Relation.DIAGONAL if query == key else after[key > query] for key in keys] for query in queries]


def block_of(queries: Runs, keys: Runs, table: Table) -> Block:
    """The block of a rank's queries and another rank's keys; needed keys lie one after the other in it."""
    needed = [any(row[number] for row in table) for number in range(len(keys))]
    lengths = [stop - start for start, stop in keys]
    places = list(accumulate((length * need for length, need in zip(lengths, needed, strict=True)), initial=0))
    starts = list(accumulate(lengths, initial=0))
    spans = joined((starts[number], starts[number + 1]) for number, need in enumerate(needed) if need)

    found: list[list[Piece]] = []
    first = 0
    for (start, stop), relations in zip(queries, table, strict=True):
        rows = first, first + stop - start
        first = rows[1]
        pieces: list[Piece] = []
        for (begin, end), relation, place in zip(keys, relations, places, strict=False):
            if relation == Relation.NOTHING:
                continue
            piece = Piece(rows, (place, place + end - begin), (begin, end), relation)
            last = pieces[-1] if pieces else None
            if (  # keys that lie side by side are one piece
                last is not None
                and last.relation == relation != Relation.DIAGONAL
                and last.keys[1] == place
                and (relation == Relation.ALL or last.columns[1] == begin)  # a mask's columns must lie so, too
            ):
                pieces[-1] = piece._replace(keys=(last.keys[0], piece.keys[1]), columns=(last.columns[0], end))
            else:
                pieces.append(piece)
        # Runs of queries that meet the same keys are one piece, unless each position has its own diagonal.
        is_diagonal = any(piece.relation == Relation.DIAGONAL for piece in pieces)
        if found and not is_diagonal and [piece[1:] for piece in found[-1]] == [piece[1:] for piece in pieces]:
            found[-1] = [piece._replace(rows=(piece.rows[0], rows[1])) for piece in found[-1]]
        else:
            found.append(pieces)
    return Block(spans, length_of(spans), tuple(piece for pieces in found for piece in pieces))


# ---------------------------------------------------------------- masks: which rectangles they hide, and which not

# Each rank reads its own rows once for each mask; all ranks gather these tables, so that they agree on what is sent.

HIDDEN = -1e30
"""A bias below which a score has no weight, as long as another bias of its row is above `SEEN`."""
SEEN = -1e29
SMALLEST_TILE = 256


def tiled(of_ranks: Sequence[Runs]) -> list[Runs]:
    """Runs cut into tiles, of which a mask may hide some: quarters of the longest run, for many calls cost as well."""
    longest = max((stop - start for runs in of_ranks for start, stop in runs), default=0)
    step = max(SMALLEST_TILE, -(-longest // 4))
    return [
        tuple((first, min(first + step, stop)) for start, stop in runs for first in range(start, stop, step))
        for runs in of_ranks
    ]


def encode_table(mask: Tensor, queries: Runs, keys: Sequence[Span]) -> Tensor:
    """Whether some row's biases are all huge negative numbers, then the relations row by row, as int8."""
    is_bool = mask.dtype == torch.bool
    hidden = (~mask if is_bool else mask <= HIDDEN).flatten(0, 1).all(0)  # [own, T]
    seen = (mask if is_bool else mask == 0).flatten(0, 1).all(0)
    by_keys = [torch.stack([_columns(each, key).all(1) for key in keys], 1) for each in (hidden, seen)]
    drowned = torch.zeros((), dtype=torch.long, device=mask.device)
    if not is_bool and mask.numel():
        most = mask.amax(-1)
        drowned = ((most <= SEEN) & (most > -math.inf)).any().long()
    codes = [drowned[None]]
    first = 0
    for query in queries:
        length = query[1] - query[0]
        rows = slice(None) if mask.shape[-2] == 1 else slice(first, first + length)
        first += length
        nothing, everything = (each[rows].all(0) for each in by_keys)
        row = torch.where(everything, int(Relation.ALL), int(Relation.MASKED))
        row = torch.where(nothing, int(Relation.NOTHING), row)
        own_hidden, own_seen = _columns(hidden[rows], query), _columns(seen[rows], query)
        if query in keys and own_hidden.shape == (length, length) and length > 1:
            later = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
            is_causal = torch.where(later, own_hidden, own_seen).all()
            place = keys.index(query)
            row[place] = torch.where(is_causal, int(Relation.DIAGONAL), row[place])
        codes.append(row)
    return torch.cat(codes).to(torch.int8)


def _columns(rows: Tensor, key: Span) -> Tensor:
    return rows if rows.shape[1] == 1 else rows[:, slice(*key)]
