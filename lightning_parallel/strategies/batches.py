"""What ranks agree on about the batches they read: the same kind, the same number, and how much each counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from lightning_parallel.strategies.agreement import describe, gather, largest, require_same
from lightning_parallel.strategies.loaders import DividedIterable, Readers, Share

EVENLY = "every rank must read equally many batches"
ENDED = -1


class Batches:
    """Watches the batches of one run on all ranks at once.

    Args:
        readers: the ranks that read different samples.
        group: all ranks, for messages of the host.
    """

    def __init__(self, readers: Readers, group: dist.ProcessGroup) -> None:
        self.readers = readers
        self._group = group
        self._uncounted: list[int] = []
        #: how much this rank's batch counts against the others' on average; 0.0 for one that does not count
        self.weight = 1.0

    def register(self, loader: Any) -> None:
        """A loader is about to be used.

        Raises:
            ValueError: on every rank, if its length differs between ranks.
        """
        lengths = gather(length_of(loader), self._group)
        require_same(f"the number of batches of {type(loader).__name__}", lengths, EVENLY)

    def begin(self, combined: Any, batch: Any, batch_idx: int, dataloader_idx: int, is_last: bool) -> None:
        """A batch is about to be used.

        Raises:
            ValueError: on every rank, if the kinds of batches differ, or one rank ends before the others.
        """
        loaders = [combined.flattened[dataloader_idx]] if combined._mode == "sequential" else combined.flattened
        if batch_idx == 0:
            require_same("the structure of a batch", gather(describe(batch), self._group), "look at the dataset there")
            self._require_same_streams(loaders)
        if any(length_of(loader) is None for loader in loaders):
            self._require_same_end(batch_idx + 1 if is_last else 0)
        self.weight = self._weight_of(loaders, batch_idx)
        if self.weight == 0.0:
            self._uncounted.append(dataloader_idx)

    def end(self, combined: Any) -> None:
        """An epoch is over."""
        if combined is not None and any(length_of(loader) is None for loader in combined.flattened):
            self._require_same_end(ENDED)

    def drop_uncounted_predictions(self, loop: Any) -> None:
        """Removes what a prediction loop keeps for samples that do not count; they come last."""
        for dataloader_idx in self._uncounted:
            for kept in (loop._predictions[dataloader_idx], loop.epoch_batch_indices[dataloader_idx]):
                if kept:
                    kept.pop()
        self._uncounted.clear()

    def _require_same_end(self, ended: int) -> None:
        low, high = largest([-ended, ended], self._group)
        if -low != high:
            said = f"the last batch is number {ended}" if ended > 0 else "more follow" if ended == 0 else "none is left"
            require_same("the end of the data", gather(said, self._group), EVENLY)

    def _require_same_streams(self, loaders: Sequence[Any]) -> None:
        for loader in loaders:
            dataset = getattr(loader, "dataset", None)
            if isinstance(dataset, DividedIterable):
                require_same(
                    f"the stream of {type(dataset.dataset).__name__}",
                    gather(dataset.fingerprints.tolist(), self._group),
                    "if it divides itself by rank, pass Trainer(use_distributed_sampler=False)",
                )

    def _weight_of(self, loaders: Sequence[Any], batch_idx: int) -> float:
        shares: list[Share | None] = [getattr(loader, "uneven", {}).get(batch_idx) for loader in loaders]
        uneven = [share for share in shares if share is not None]
        if not uneven:
            return 1.0
        if len(loaders) > 1:
            raise ValueError(
                f"one of {len(loaders)} loaders read together ends with {uneven[0].total} samples, which "
                f"{self.readers.ranks} ranks cannot share evenly; give it drop_last=True"
            )
        return uneven[0].weight(self.readers.ranks)


def length_of(loader: Any) -> int | None:
    """The number of batches of a loader, None where it does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
