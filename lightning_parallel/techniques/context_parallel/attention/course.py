"""The course of a ring, told in advance: who attends to what in which step, who computes and who sends how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_parallel.collectives.spans import Runs, Span
from lightning_parallel.techniques.context_parallel.attention.blocks import (
    Block,
    Relation,
    Table,
    block_of,
    causal,
    full,
)
from lightning_parallel.techniques.context_parallel.attention.masks import table_of


class Meeting(NamedTuple):
    """Positions of a rank that meet positions of another one in a step."""

    step: int
    rank: int
    queries: Span
    keys: Span
    relation: Relation


@dataclass(frozen=True)
class Course:
    """The steps of a ring.

    Args:
        name: of the mask.
        runs: the positions that each rank has.
        tables: by the ranks of queries and of keys, their relations.
    """

    name: str
    runs: tuple[Runs, ...]
    tables: tuple[tuple[Table, ...], ...]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.runs)

    @property
    def size(self) -> int:
        """Of the sequence."""
        return max(stop for runs in self.runs for _, stop in runs)

    def other(self, rank: int, step: int) -> int:
        """Whose keys and values a rank has in a step."""
        return (rank - step) % self.ranks

    @cached_property
    def meetings(self) -> list[Meeting]:
        """All that meets, step by step."""
        return [
            Meeting(step, rank, query, key, relation)
            for step in range(self.ranks)
            for rank in range(self.ranks)
            for query, row in zip(self.runs[rank], self.tables[rank][self.other(rank, step)], strict=True)
            for key, relation in zip(self.runs[self.other(rank, step)], row, strict=True)
            if relation
        ]

    def scores(self, rank: int, step: int) -> int:
        """How many a rank computes in a step."""
        return sum(piece.pairs for piece in self._block(rank, self.other(rank, step)).pieces)

    def sent(self, rank: int) -> int:
        """To how many positions of other ranks' memory a rank sends keys and values, in all steps."""
        return sum(self._block(other, rank).length for other in range(self.ranks) if other != rank)

    def _block(self, rank: int, other: int) -> Block:
        return block_of(self.runs[rank], self.runs[other], self.tables[rank][other])


def course(ranks: int, size: int, mask: str = "causal", balanced: bool = True) -> Course:
    """The course of a ring over a sequence.

    Args:
        ranks: of the ring.
        size: of the sequence.
        mask: "causal", "full", "window:N" for each position and the N - 1 before it, or "documents:A,B,..." for
            documents of these lengths, causal within each.
        balanced: whether ranks have chunks in zigzag, or one each.

    Raises:
        ValueError: no such mask, or sizes that do not fit.
    """
    if ranks < 1 or size < 2 * ranks:
        raise ValueError(
            f"{size} positions are too few for two chunks on each of {ranks} ranks; give at least {2 * max(ranks, 1)}"
        )
    runs = tuple(_runs(ranks, size, rank, balanced) for rank in range(ranks))
    relations = _relations(mask, size)
    return Course(mask, runs, tuple(tuple(relations(queries, keys) for keys in runs) for queries in runs))


def _runs(ranks: int, size: int, rank: int, balanced: bool) -> Runs:
    count = 2 * ranks if balanced else ranks
    numbers = (rank, count - 1 - rank) if balanced else (rank,)
    edges = [number * size // count for number in range(count + 1)]
    return tuple((edges[number], edges[number + 1]) for number in numbers)


def _relations(mask: str, size: int) -> Callable[[Runs, Runs], Table]:
    kind, _, argument = mask.partition(":")
    if mask in ("causal", "full"):
        return causal if mask == "causal" else full
    numbers = _numbers(argument)
    if kind not in ("window", "documents") or not numbers or (kind == "window" and len(numbers) > 1):
        raise ValueError(f"mask {mask!r} is none of causal, full, window:N, documents:A,B,...")
    whole = _window(size, numbers[0]) if kind == "window" else _documents(size, numbers)

    def relations(queries: Runs, keys: Runs) -> Table:
        rows = torch.cat([whole[start:stop] for start, stop in queries])
        return table_of(rows[None, None], queries, keys)

    return relations


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.isdigit() and int(part) for part in parts) else []


def _window(size: int, width: int) -> Tensor:
    distance = torch.arange(size)[:, None] - torch.arange(size)
    return (distance >= 0) & (distance < width)


def _documents(size: int, lengths: Sequence[int]) -> Tensor:
    if sum(lengths) != size:
        raise ValueError(f"documents of {sum(lengths)} positions do not fill a sequence of {size}; make them as many")
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return (ids[:, None] == ids) & _window(size, size)
