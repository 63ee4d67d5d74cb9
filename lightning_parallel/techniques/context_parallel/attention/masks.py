"""Masks, seen in rectangles: which of them hide everything, which nothing, and which are what the causal order is.

Ranks look at their own rows, once for each mask, and tell each other, so that all agree on what travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_parallel.collectives.circle import Circle
from lightning_parallel.collectives.elements import Runs, Span
from lightning_parallel.techniques.context_parallel.attention.blocks import Relation, Table

HIDDEN = -1e30
"""A summand of a score below which nothing is left of it, as long as another one of the row is above `SEEN`."""
SEEN = -1e29


def tables_of_all(mask: Tensor, runs: Sequence[Runs], keys: Sequence[Span], everyone: Circle) -> list[Table] | None:
    """The relations of each rank's queries to keys.

    Args:
        mask: this rank's rows with all columns, (B, H, own, T); what is broadcast has size 1.
        runs: the positions that each rank has.
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


def _table(codes: Sequence[int], rows: int, columns: int) -> Table:
    return [[Relation(code) for code in codes[row * columns : (row + 1) * columns]] for row in range(rows)]


def _coded(mask: Tensor, queries: Runs, keys: Sequence[Span]) -> Tensor:
    """Whether some row is all huge numbers; then the relations, one row of the table after the other."""
    is_bool = mask.dtype == torch.bool
    hidden = ~mask if is_bool else mask <= HIDDEN
    seen = mask if is_bool else mask == 0
    codes = [_drowned(mask)]
    first = 0
    for query in queries:
        rows = slice(None) if mask.shape[-2] == 1 else slice(first, first + query[1] - query[0])
        first += query[1] - query[0]
        for key in keys:
            columns = slice(None) if mask.shape[-1] == 1 else slice(*key)
            codes.append(_relation(hidden[..., rows, columns], seen[..., rows, columns], query == key))
    return torch.stack(codes).to(torch.int8)


def _drowned(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool or not mask.numel():
        return torch.zeros((), dtype=torch.long, device=mask.device)
    most = mask.amax(-1)
    return ((most <= SEEN) & (most > -math.inf)).any().long()


def _relation(hidden: Tensor, seen: Tensor, may_be_diagonal: bool) -> Tensor:
    """The number of the relation, on the mask's device: one look at all of them is enough."""
    everything = seen.all()
    code = torch.where(everything, int(Relation.ALL), int(Relation.MASKED))
    code = torch.where(hidden.all(), int(Relation.NOTHING), code)
    if may_be_diagonal and hidden.shape[-2] == hidden.shape[-1] > 1:
        later = torch.ones(hidden.shape[-2:], dtype=torch.bool, device=hidden.device).triu(1)
        code = torch.where(torch.where(later, hidden, seen).all(), int(Relation.DIAGONAL), code)
    return code
