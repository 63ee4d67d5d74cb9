"""What a batch would be without one of its samples, made of samples that have been read: nothing is read for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from lightning_parallel.strategies.data.randomness import RandomState
from lightning_parallel.strategies.data.unmoved import unmoved


class Versions(NamedTuple):
    """A batch made anew: whole, then without a sample, another one each time.

    Attributes:
        made: these; only the whole where nothing could be left out.
        size: how many samples the whole has.
        fault: why no sample could be left out; empty where it could, or need not be.
    """

    made: list[Any]
    size: int = 0
    fault: str = ""

    @classmethod
    def of(cls, samples: list[Any], collate: Callable[[Any], Any]) -> Versions:
        """What a function makes of copies of these samples; it stands afterwards where it stood."""
        size = len(samples)
        without = [None, *sorted({(size - 1) * k // 4 for k in range(5)})]
        try:
            return cls([_collated(samples, left_out, collate) for left_out in without], size)
        except Exception as error:  # it may need all samples, or samples may be of a kind that cannot be copied
            return cls([], size, f"{type(error).__name__}: {error}")


class WithVersions(NamedTuple):
    """The first batch of a pass, on its way from a worker of its loader."""

    batch: Any
    versions: Versions


class LeavingOut:
    """Collates as the user does; beside the first batch of a loader it makes its versions.

    Args:
        collate: the user's.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self.has_received = self._is_expected = False
        self._versions: Versions | None = None

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Inside, a first batch is on its way to `received`; who calls at other times gets what the user's makes."""
        self._is_expected = not self.has_received
        try:
            yield
        finally:
            self._is_expected = False

    def __call__(self, samples: Any) -> Any:  # noqa: D102
        worker = get_worker_info()
        if not self._is_expected or (worker is not None and worker.id != 0):  # worker 0 makes the first batch
            return self.collate(samples)
        self._is_expected = False
        if not isinstance(samples, list) or len(samples) < 2:
            return self.collate(samples)
        versions = Versions.of(samples, self.collate)
        return WithVersions(self.collate(samples), versions)

    def received(self, batch: Any) -> Any:
        """The batch that a loader yields, without its versions, which are kept here until they are taken."""
        self.has_received = True
        if not isinstance(batch, WithVersions):
            return batch
        self._versions = batch.versions
        return batch.batch

    def take(self) -> Versions | None:
        """The versions of the first batch; None where there are none, or they have been taken."""
        versions, self._versions = self._versions, None
        return versions


def _collated(samples: list[Any], left_out: int | None, collate: Callable[[Any], Any]) -> Any:
    kept = [sample for number, sample in enumerate(samples) if number != left_out]
    with unmoved([collate]), RandomState.preserved():
        return collate(copy.deepcopy(kept))
