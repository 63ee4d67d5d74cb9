"""Attention masks as tables of rectangles: which hide everything, hide nothing, or are the causal order.

Each rank reads its own rows once for each mask; all ranks gather these tables, so that they agree on what is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.functional import parts_of_all
from lightning_parallel.collectives.spans import Runs, Span
from lightning_parallel.techniques.context_parallel.blocks import Relation, Table

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


def gather_tables(
    mask: Tensor, runs: Sequence[Runs], keys: Sequence[Span], group: dist.ProcessGroup
) -> list[Table] | None:
    """Return each rank's table of relations of its queries to keys. Collective over the group.

    Args:
        mask: this rank's rows with all columns, [B, H, own, T]; what is broadcast has size 1.
        runs: positions of each rank: rows of the tables.
        keys: spans of positions: columns of the tables.
        group: the ranks.

    Returns:
        None where some row's biases are all huge negative numbers: then softmax depends on how sums are rounded.
    """
    own = encode_table(mask, runs[group.rank()], keys)
    longest = max(len(each) for each in runs)
    message = own.new_zeros(longest * len(keys) + 1)
    message[: len(own)] = own
    tables = list[Table]()
    for (drowned, *codes), rows in zip(parts_of_all(message, group).tolist(), runs, strict=True):
        if drowned:
            return None
        columns = len(keys)
        tables.append([[Relation(code) for code in codes[n * columns : (n + 1) * columns]] for n in range(len(rows))])
    return tables


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
