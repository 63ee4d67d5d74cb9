"""Indices of one dimension as spans, and how they are distributed over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import ceil

import torch
from torch import Tensor

Span = tuple[int, int]
"""Consecutive indices: the first one, and the one after the last."""

Runs = tuple[Span, ...]
"""The spans of one rank, in ascending order; no two of them touch."""


def bounds(size: int, ranks: int, rank: int) -> Span:
    """Return the span of a dimension of `size` that a rank keeps: ceil(size / ranks) indices, the last ranks fewer.

    This is how torch chunks a tensor. E.g. a size of 10 on 4 ranks: (0, 3), (3, 6), (6, 9), (9, 10).
    """
    chunk = ceil(size / ranks)
    start = min(rank * chunk, size)
    return start, min(start + chunk, size)


def balanced(count: int, ranks: int) -> list[Span]:
    """Return the span of each rank; lengths differ by at most one, and the first ranks have the longer spans."""
    lengths = [count // ranks + (rank < count % ranks) for rank in range(ranks)]
    ends = list(accumulate(lengths))
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def joined(spans: Iterable[Span]) -> Runs:
    """Drop empty spans and merge spans that touch: (0, 2), (2, 4) become (0, 4)."""
    merged: list[Span] = []
    for start, stop in spans:
        if start < stop and merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], stop
        elif start < stop:
            merged.append((start, stop))
    return tuple(merged)


def length_of(spans: Iterable[Span]) -> int:
    """Return the number of indices in the spans."""
    return sum(stop - start for start, stop in spans)


def within(spans: Sequence[Span], piece: Span) -> Iterator[Span]:
    """Return the spans of positions `piece` along `spans`: positions (2, 6) of (0, 4), (8, 12) are (2, 4), (8, 10)."""
    before = 0
    for start, stop in spans:
        first, last = max(piece[0] - before, 0), min(piece[1] - before, stop - start)
        if first < last:
            yield start + first, start + last
        before += stop - start


def indices(spans: Sequence[Span]) -> Tensor:
    """Return all indices of the spans, [length]."""
    return torch.cat([torch.arange(*span) for span in spans]) if spans else torch.empty(0, dtype=torch.long)
