"""Where samples are in the batches of loaders, seen in the first batch of each."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_parallel.strategies.data.first_batches import agreed, read_together, seen, tell_unseen, versions_of
from lightning_parallel.strategies.data.loaders import DividedLoader, undivided
from lightning_parallel.strategies.lightning_package import Trainer
from lightning_parallel.strategies.trainer import lightnings
from lightning_parallel.techniques.tools.microbatches import Layout


class Layouts:
    """Of loaders, or several that are read together, as long as they are there.

    Args:
        trainer: who reads them.
        host: all ranks.
    """

    def __init__(self, trainer: Trainer, host: dist.ProcessGroup) -> None:
        self._trainer, self._host = trainer, host
        self._known = dict[Any, _Seen]()

    def knows(self, combined: Any, dataloader_idx: int) -> bool:
        """Whether it has been looked at a first batch, or none can be; the same on all ranks, which hold the same."""
        key, _ = _owned(combined, dataloader_idx)
        return key is None or (key in self._known and _are_alive(self._known[key]))

    def of(self, combined: Any, dataloader_idx: int) -> Layout:
        """Where samples are in the batches of a loop's loader; None where that could not be seen."""
        key, _ = _owned(combined, dataloader_idx)
        return None if key is None else self._known[key].layout

    def look(self, combined: Any, dataloader_idx: int) -> None:
        """Looks at the first batch that the running pass has read. All ranks must call."""
        versions, layout = versions_of(read_together(combined, dataloader_idx)), None
        device = self._trainer.strategy.root_device
        try:
            if versions is not None:
                _, layout = seen(self._trainer, combined, versions, device, dataloader_idx)
        except Exception as error:  # on this rank alone perhaps, and the others wait
            tell_unseen(f"{type(error).__name__}: {error}")
        self.agree(combined, dataloader_idx, layout)

    def agree(self, combined: Any, dataloader_idx: int, layout: Layout) -> Layout:
        """Keeps what ranks saw, if it is the same, or tells all what one of them saw. All ranks must call."""
        layout, (key, owners) = agreed(layout, self._host), _owned(combined, dataloader_idx)
        self._known = {key: known for key, known in self._known.items() if _are_alive(known)}
        if key is not None:
            self._known[key] = _Seen(list(map(weakref.ref, owners)), layout)
        return layout

    def drop_versions(self, combined: Any, dataloader_idx: int) -> None:
        """Lets go of what a first batch came with, which nobody needs."""
        for loader in read_together(combined, dataloader_idx):
            if isinstance(loader, DividedLoader):
                loader.take_versions()


@dataclass(frozen=True)
class _Seen:
    owners: list[weakref.ref[Any]]
    layout: Layout


def _are_alive(seen: _Seen) -> bool:
    return all(owner() is not None for owner in seen.owners)


def _owned(combined: Any, dataloader_idx: int) -> tuple[Any, list[Any]]:
    """By what a batch's loaders are known, and the user's own, which are the same though they are divided anew.

    There is no key where one has no samples to be left out.
    """
    owners = [undivided(loader) for loader in read_together(combined, dataloader_idx)]
    if not all(isinstance(owner, DataLoader) for owner in owners):
        return None, owners
    return (dataloader_idx, lightnings.way_of_reading(combined), *map(id, owners)), owners
