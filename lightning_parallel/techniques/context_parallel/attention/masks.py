"""Masks, seen in rectangles: which of them hide everything, which nothing, and which are what the causal order is.

Ranks look at their own rows, once for each mask, and tell each other, so that all agree on what travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_parallel.collectives.circle import Circle
from lightning_parallel.collectives.spans import Runs, Span
from lightning_parallel.techniques.context_parallel.attention.blocks import Relation, Table

HIDDEN = -1e30
"""A summand of a score below which nothing is left of it, as long as another one of the row is above `SEEN`."""
SEEN = -1e29


SMALLEST = 256
"""The least positions of a piece of a run."""


def tables_of_all(mask: Tensor, runs: Sequence[Runs], keys: Sequence[Span], everyone: Circle) -> list[Table] | None:
    """The relations of each rank's queries to keys.

    Args:
        mask: this rank's rows with all columns, (B, H, own, T); what is broadcast has size 1.
        runs: the positions that each rank has, as the tables are to have them.
        keys: spans of positions, the columns of the tables.
        everyone: the ranks, all of which call this.

    Returns:
        A table for each rank; None where all scores of some row have summands of minus a huge number, which leaves a
        softmax over what such sums are rounded to.
    """
    own = _coded(mask, runs[everyone.place], keys)
    longest = max(len(each) for each in runs)
    message = own.new_zeros(longest * len(keys) + 1)
    message[: len(own)] = own
    told = [each.tolist() for each in everyone.told(message)]
    if any(each[0] for each in told):
        return None
    return [_table(each[1:], len(mine), len(keys)) for each, mine in zip(told, runs, strict=True)]


def table_of(mask: Tensor, queries: Runs, keys: Sequence[Span]) -> Table:
    """The relations of queries to keys, by the rows of a mask for these queries, (B, H, own, T)."""
    return _table(_coded(mask, queries, keys)[1:].tolist(), len(queries), len(keys))


def _table(codes: Sequence[int], rows: int, columns: int) -> Table:
    return [[Relation(code) for code in codes[row * columns : (row + 1) * columns]] for row in range(rows)]


def _coded(mask: Tensor, queries: Runs, keys: Sequence[Span]) -> Tensor:
    """Whether some row is all huge numbers; then the relations, one row of the table after the other."""
    is_bool = mask.dtype == torch.bool
    hidden = (~mask if is_bool else mask <= HIDDEN).flatten(0, 1).all(0)
    seen = (mask if is_bool else mask == 0).flatten(0, 1).all(0)
    by_keys = [torch.stack([_columns(each, key).all(1) for key in keys], 1) for each in (hidden, seen)]
    codes = [_drowned(mask)[None]]
    first = 0
    for query in queries:
        rows = slice(None) if mask.shape[-2] == 1 else slice(first, first + query[1] - query[0])
        first += query[1] - query[0]
        nothing, everything = (each[rows].all(0) for each in by_keys)
        row = torch.where(everything, int(Relation.ALL), int(Relation.MASKED))
        row = torch.where(nothing, int(Relation.NOTHING), row)
        if query in keys:
            place = keys.index(query)
            is_diagonal = _is_diagonal(_columns(hidden[rows], query), _columns(seen[rows], query))
            row[place] = torch.where(is_diagonal, int(Relation.DIAGONAL), row[place])
        codes.append(row)
    return torch.cat(codes).to(torch.int8)


def _columns(rows: Tensor, key: Span) -> Tensor:
    return rows if rows.shape[1] == 1 else rows[:, slice(*key)]


def _drowned(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool or not mask.numel():
        return torch.zeros((), dtype=torch.long, device=mask.device)
    most = mask.amax(-1)
    return ((most <= SEEN) & (most > -math.inf)).any().long()


def _is_diagonal(hidden: Tensor, seen: Tensor) -> Tensor:
    rows, columns = hidden.shape
    if rows != columns or rows == 1:
        return torch.zeros((), dtype=torch.bool, device=hidden.device)
    later = torch.ones(rows, rows, dtype=torch.bool, device=hidden.device).triu(1)
    return torch.where(later, hidden, seen).all()


def tiled(runs: Runs, longest: int) -> Runs:
    """Runs in pieces no longer than so many positions: a mask may rule out parts of a run."""
    return tuple((first, min(first + longest, stop)) for start, stop in runs for first in range(start, stop, longest))


def tile_of(runs: Sequence[Runs]) -> int:
    """How long pieces of runs are where a mask is looked at: of a long run a quarter, as many calls cost as well."""
    longest = max((stop - start for each in runs for start, stop in each), default=0)
    return max(SMALLEST, -(-longest // 4))
