"""Which part of each global batch a rank reads, how much that part counts, and what is known about one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Share(NamedTuple):
    """The part of a global batch that a rank reads: so many samples of so many."""

    samples: int
    total: int

    def weight(self, ranks: int) -> float:
        """The factor that makes the mean over ranks of their means the mean over all samples."""
        return self.samples * ranks / self.total


@dataclass(frozen=True)
class DataSharding:
    """How data is divided among ranks.

    Attributes:
        ranks: the number of ranks that read different samples.
        rank: the number of this rank among them.
        copies: the number of ranks that read the same samples as this one, itself among them.
    """

    ranks: int
    rank: int
    copies: int = 1

    def part(self, items: list[T]) -> tuple[list[T], Share]:
        """This rank's items of a global batch, as even as can be; one that does not count where none is left."""
        base, extra = divmod(len(items), self.ranks)
        start = self.rank * base + min(self.rank, extra)
        part = items[start : start + base + (self.rank < extra)]
        return part or items[:1], Share(len(part), len(items))

    def round_robin(self, batches: list[T], sizes: list[int]) -> tuple[T, Share]:
        """This rank's batch where whole batches are dealt in turn; the first does not count where none is left."""
        mine = self.rank < len(batches)
        return batches[self.rank if mine else 0], Share(sizes[self.rank] if mine else 0, sum(sizes))

    def require_same_batches(self, before: int, now: int) -> None:
        """Raise ValueError for a run that would go on within an epoch with global batches of another size."""
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
    """Notes of one pass over a loader. They hold no reference to the iterator, so that its workers can end.

    Attributes:
        uneven: the batches that ranks share unevenly, by their numbers in this pass.
        length: the number of batches of the epoch, once all have been drawn.
        order: a checksum of the order of samples.
        contents: checksums of some batches, where several ranks must read the same.
        begins_at: Lightning's index of the first batch, which is above 0 where a run goes on within an epoch.
    """

    uneven: dict[int, Share] = field(default_factory=dict)
    length: int | None = None
    order: int = 0
    contents: dict[int, int] = field(default_factory=dict)
    begins_at: int | None = None

    def note(self, number: int, share: Share, ranks: int) -> None:
        """Note how ranks share batch `number`."""
        if share.samples * ranks != share.total:
            self.uneven[number] = share

    def number_of(self, batch_idx: int) -> int:
        """The number in this pass of the batch that Lightning counts as `batch_idx`; asked for one after the other."""
        self.begins_at = batch_idx if self.begins_at is None else self.begins_at
        return batch_idx - self.begins_at


class Reading(Iterator[Any]):
    """The iterator of one pass over a loader. Its notes stay right when another pass begins, on one rank perhaps.

    Args:
        batches: what the loader yields.
        notes: of this pass.
        sampler_notes: returns those of the loader's sampler, whose pass has begun when the first batch is there.
        checksum: computes the checksum of a batch; None where no other rank reads the same.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        notes: PassNotes,
        sampler_notes: Callable[[], PassNotes] | None = None,
        checksum: Callable[[Any], int] | None = None,
    ) -> None:
        self._batches, self._sampler_notes, self._checksum, self._number = batches, sampler_notes, checksum, 0
        self.notes = notes

    def peek(self) -> Any:
        """Return the next batch, which `next` will return again."""
        batch = next(self._batches)
        self._batches = chain([batch], self._batches)
        return batch

    def __next__(self) -> Any:
        batch = next(self._batches)
        if self._number == 0 and self._sampler_notes is not None:
            own = self._sampler_notes()
            self.notes.uneven, self.notes.order = own.uneven, own.order
        if self._checksum is not None and is_compared(self._number):
            self.notes.contents[self._number] = self._checksum(batch)
        self._number += 1
        return batch
