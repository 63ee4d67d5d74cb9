"""Rectangles of attention scores: which queries of one rank attend to which keys of another rank.

Example: causal attention, 8 positions in zigzag over 2 ranks. Rank 0 has the positions 0-1 and 6-7, rank 1 has 2-5:

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
    """To which keys of a rectangle its queries attend."""

    NOTHING = 0
    MASKED = 1
    """As the mask says."""
    ALL = 2
    DIAGONAL = 3
    """Each query attends to the keys up to its own position."""


Table = Sequence[Sequence[Relation]]
"""The relation of each run of queries (row) to each run of keys (column)."""


class Piece(NamedTuple):
    """The queries and keys of one kernel call."""

    rows: Span
    """Indices of the queries among this rank's queries."""
    keys: Span
    """Indices of the keys among those of the block."""
    columns: Span
    """Positions of the keys in the sequence, which are columns of a mask."""
    relation: Relation


class Block(NamedTuple):
    """A rank's queries and those keys of one rank to which they attend."""

    spans: Runs
    """Indices of the needed keys among those of the rank that sends them."""
    length: int
    """Number of needed keys."""
    pieces: tuple[Piece, ...]


def causal_table(queries: Runs, keys: Runs) -> Table:
    """Return the relations of causal attention. A run of queries and one of keys must be equal or disjoint."""
    disjoint = Relation.ALL, Relation.NOTHING  # of earlier keys, of later keys
    return [[Relation.DIAGONAL if query == key else disjoint[key > query] for key in keys] for query in queries]


def block_of(queries: Runs, keys: Runs, table: Table) -> Block:
    """Return the block of a rank's queries and another rank's keys, of which it has only the needed ones, in order."""
    needed = [any(row[number] for row in table) for number in range(len(keys))]
    lengths = [stop - start for start, stop in keys]
    # where each run of keys begins: `places` in the block, `starts` among all keys of the rank that sends them
    places = list(accumulate((length * need for length, need in zip(lengths, needed, strict=True)), initial=0))
    starts = list(accumulate(lengths, initial=0))
    spans = joined((starts[number], starts[number + 1]) for number, need in enumerate(needed) if need)

    merged: list[list[Piece]] = []
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
            if (  # neighbouring keys are merged into one piece
                last is not None
                and last.relation == relation != Relation.DIAGONAL
                and last.keys[1] == place
                and (relation == Relation.ALL or last.columns[1] == begin)  # neighbours in the mask, too
            ):
                pieces[-1] = piece._replace(keys=(last.keys[0], piece.keys[1]), columns=(last.columns[0], end))
            else:
                pieces.append(piece)
        # Runs of queries that attend to the same keys are merged, too, unless they are on the diagonal.
        is_diagonal = any(piece.relation == Relation.DIAGONAL for piece in pieces)
        if merged and not is_diagonal and [piece[1:] for piece in merged[-1]] == [piece[1:] for piece in pieces]:
            merged[-1] = [piece._replace(rows=(piece.rows[0], rows[1])) for piece in merged[-1]]
        else:
            merged.append(pieces)
    return Block(spans, length_of(spans), tuple(piece for pieces in merged for piece in pieces))


# ---------------------------------------------------------------- which rectangles a mask hides

# Each rank reads its rows of a mask once; the tables of all ranks are gathered, so that ranks agree on what is sent.

HIDDEN_BIAS = -1e30
"""Scores with a bias up to this one have weight 0, if another bias of the row is above `VISIBLE_BIAS`."""
VISIBLE_BIAS = -1e29
SMALLEST_TILE = 256
"""Least length of a tile, in positions."""


def tiled(of_ranks: Sequence[Runs]) -> list[Runs]:
    """Cut runs into tiles, of which a mask may hide some; quarters of the longest run, as kernel calls cost, too."""
    longest = max((stop - start for runs in of_ranks for start, stop in runs), default=0)
    step = max(SMALLEST_TILE, -(-longest // 4))
    return [
        tuple((first, min(first + step, stop)) for start, stop in runs for first in range(start, stop, step))
        for runs in of_ranks
    ]


def encode_table(mask: Tensor, queries: Runs, keys: Sequence[Span]) -> Tensor:
    """Return as int8 whether some row has huge negative biases only (see `schedule_by_mask`), then all relations."""
    is_bool = mask.dtype == torch.bool
    hidden = (~mask if is_bool else mask <= HIDDEN_BIAS).flatten(0, 1).all(0)  # [t, T]
    seen = (mask if is_bool else mask == 0).flatten(0, 1).all(0)
    by_keys = [torch.stack([_columns(each, key).all(1) for key in keys], 1) for each in (hidden, seen)]
    is_degenerate = torch.zeros((), dtype=torch.long, device=mask.device)
    if not is_bool and mask.numel():
        highest = mask.amax(-1)
        is_degenerate = ((highest <= VISIBLE_BIAS) & (highest > -math.inf)).any().long()
    codes = [is_degenerate[None]]
    first = 0
    for query in queries:
        length = query[1] - query[0]
        rows = slice(None) if mask.shape[-2] == 1 else slice(first, first + length)
        first += length
        nothing, everything = (each[rows].all(0) for each in by_keys)
        row = torch.where(everything, int(Relation.ALL), int(Relation.MASKED))
        row = torch.where(nothing, int(Relation.NOTHING), row)
        square_hidden, square_seen = _columns(hidden[rows], query), _columns(seen[rows], query)
        # the square of a run's queries and its own keys may be causal
        if query in keys and square_hidden.shape == (length, length) and length > 1:
            later = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
            is_causal = torch.where(later, square_hidden, square_seen).all()
            place = keys.index(query)
            row[place] = torch.where(is_causal, int(Relation.DIAGONAL), row[place])
        codes.append(row)
    return torch.cat(codes).to(torch.int8)


def _columns(rows: Tensor, key: Span) -> Tensor:
    return rows if rows.shape[1] == 1 else rows[:, slice(*key)]
