"""Indices of one dimension as spans, and how they are shared out among ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import ceil

import torch
from torch import Tensor

Span = tuple[int, int]
"""Indices that follow each other: the first, and the one after the last."""

Runs = tuple[Span, ...]
"""The spans of one rank, in ascending order; no two touch."""


def bounds(size: int, ranks: int, rank: int) -> Span:
    """The first index that a rank keeps of a dimension of this size, and the one after the last.

    Ranks have ceil(size / ranks) of them, the last ones fewer: as torch divides a tensor.
    """
    chunk = ceil(size / ranks)
    start = min(rank * chunk, size)
    return start, min(start + chunk, size)


def balanced(count: int, ranks: int) -> list[Span]:
    """The span of each rank, where the lengths of no two differ by more than one; the first ones are longer."""
    lengths = [count // ranks + (rank < count % ranks) for rank in range(ranks)]
    ends = list(accumulate(lengths))
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def joined(spans: Iterable[Span]) -> Runs:
    """Spans without empty ones; spans that touch become one."""
    found: list[Span] = []
    for start, stop in spans:
        if start < stop and found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def length_of(spans: Iterable[Span]) -> int:
    """How many indices they have."""
    return sum(stop - start for start, stop in spans)


def within(spans: Sequence[Span], piece: Span) -> Iterator[Span]:
    """The part of some spans that lies from one place to another, counted along all of them."""
    before = 0
    for start, stop in spans:
        first, last = max(piece[0] - before, 0), min(piece[1] - before, stop - start)
        if first < last:
            yield start + first, start + last
        before += stop - start


def indices(spans: Sequence[Span]) -> Tensor:
    """All indices, (length,)."""
    return torch.cat([torch.arange(*span) for span in spans]) if spans else torch.empty(0, dtype=torch.long)
