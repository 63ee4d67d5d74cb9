"""A rank's part of each global batch, how much that part counts, and what is known about one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """This rank's part of a global batch: so many samples of so many."""

    samples: int
    total: int

    def weight(self, ranks: int) -> float:
        """The factor that makes the mean over ranks of their means the mean over all samples."""
        return self.samples * ranks / self.total


@dataclass(frozen=True)
class Readers:
    """The ranks that read different samples, and which of them this one is."""

    ranks: int
    rank: int
    copies: int = 1  # ranks that read the same samples as this one, itself among them

    def part(self, items: list[T]) -> tuple[list[T], Share]:
        """This rank's items of a global batch, as even as can be; one that does not count where none is left."""
        base, extra = divmod(len(items), self.ranks)
        start = self.rank * base + min(self.rank, extra)
        part = items[start : start + base + (self.rank < extra)]
        return part or items[:1], Share(len(part), len(items))

    def turn(self, batches: list[T], sizes: list[int]) -> tuple[T, Share]:
        """This rank's batch where whole batches are dealt in turn."""
        mine = self.rank < len(batches)
        return batches[self.rank if mine else 0], Share(sizes[self.rank] if mine else 0, sum(sizes))

    def require_same_batches(self, before: int, now: int) -> None:
        """Raises ValueError for a run that would go on within an epoch with global batches of another size."""
        if now == before:
            return
        divisors = ", ".join(str(count) for count in range(1, before + 1) if before % count == 0)
        other = f"{before} cannot be divided among {self.ranks}: let one of {divisors} ranks read different samples"
        fitting = f"use {before // self.ranks} per rank in place of {now // self.ranks}"
        raise ValueError(
            f"the checkpoint lies within an epoch that was read in global batches of {before}, and now one has {now} "
            f"({self.ranks} ranks read different samples): the curve would be another; "
            f"{other if before % self.ranks else fitting}, or go on from a checkpoint at the end of an epoch"
        )


CHECKED_FIRST, CHECKED_EVERY = 8, 64


def is_compared(batch_idx: int) -> bool:
    """Whether ranks that must read the same compare this batch of a pass: the first 8, then every 64th."""
    return batch_idx < CHECKED_FIRST or batch_idx % CHECKED_EVERY == 0


@dataclass
class PassNotes:
    """Notes of one pass over a loader.

    Attributes:
        uneven: the batches that ranks share unevenly.
        length: the number of batches, once all have been drawn.
        order: a checksum of the order of samples.
        contents: checksums of some batches, where several ranks must read the same.
    """

    uneven: dict[int, Share] = field(default_factory=dict)
    length: int | None = None
    order: int = 0
    contents: dict[int, int] = field(default_factory=dict)

    def note(self, number: int, share: Share, ranks: int) -> None:
        """Note how ranks share batch `number`."""
        if share.samples * ranks != share.total:
            self.uneven[number] = share


@dataclass
class Pass:
    """A pass and its notes. It holds no reference to the iterator, so that workers of the loader can end."""

    find_notes: Callable[[], PassNotes]
    notes: PassNotes | None = None


class Reading(Iterator[Any]):
    """The iterator of one pass over a loader. Its notes stay right when another pass begins, on one rank perhaps.

    Args:
        batches: what the loader yields.
        find_notes: finds the notes of this pass, once the first batch is there.
        content: computes the checksum of a batch; None where no other rank reads the same.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        find_notes: Callable[[], PassNotes],
        content: Callable[[Any], int] | None = None,
    ) -> None:
        self._batches, self._content, self._number = batches, content, 0
        self.known = Pass(find_notes)

    @property
    def notes(self) -> PassNotes | None:
        """The notes of this pass so far; None before its first batch."""
        return self.known.notes

    def peek(self) -> Any:
        """Return the next batch, which `next` will return again."""
        batch = next(self._batches)
        self._batches = chain([batch], self._batches)
        return batch

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.known.notes = self.known.notes or self.known.find_notes()  # a sampler begins its pass only now
        if self._content is not None and is_compared(self._number):
            self.known.notes.contents[self._number] = self._content(batch)
        self._number += 1
        return batch
