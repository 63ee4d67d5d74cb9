"""Buffers that a step changes: a step that runs in parts, on several ranks, changes them once for a batch.

Each part gets copies, so that all begin with what the batch found. What parts make of them is put together as other
values that a step keeps, and goes into the buffers of every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_parallel.collectives.made_of import Version, version
from lightning_parallel.strategies.lightning_package import LightningModule
from lightning_parallel.strategies.logged.kept.values import Change, Path, Sent


class BufferName(str):
    """The FQN of a buffer, as the only part of a path."""

    __slots__ = ()


class KeptBuffers:
    """Buffers of a module, of which all ranks have the same.

    Args:
        module: the user's.
        names: their FQN.
    """

    def __init__(self, module: LightningModule, names: Sequence[str] = ()) -> None:
        self._places: dict[str, tuple[dict[str, Tensor | None], str]] = {}
        for name in names:
            self._places[name] = module.get_submodule(_owner(name))._buffers, name.rpartition(".")[2]
        self._before: dict[str, Tensor] = {}
        self._lent: dict[str, tuple[Tensor, Version]] = {}

    def lend(self) -> list[Tensor]:
        """Puts copies in their places."""
        found = {name: table.get(key) for name, (table, key) in self._places.items()}
        self._before = {name: buffer for name, buffer in found.items() if buffer is not None}
        for name, buffer in self._before.items():
            table, key = self._places[name]
            copy = table[key] = buffer.clone()
            self._lent[name] = copy, version(copy)
        return [copy for copy, _ in self._lent.values()]

    def changes(self) -> dict[Path, Change]:
        """What became of the copies that changed."""
        now = {name: buffer for name, (table, key) in self._places.items() if (buffer := table.get(key)) is not None}
        counted = {name for name, lent in self._lent.items() if name in now and _is_another(now[name], *lent)}
        # BatchNorm's kernels write its statistics without counting that as a version, but it counts batches beside them
        beside = {_owner(name) for name in counted}
        return {
            (BufferName(name),): Change(now[name].detach(), before)
            for name, before in self._before.items()
            if name in counted or (name in now and _owner(name) in beside and not torch.equal(now[name], before))
        }

    def undo(self) -> None:
        """Puts the buffers back."""
        for name, buffer in self._before.items():
            table, key = self._places[name]
            table[key] = buffer

    def keep(self, changes: Mapping[Path, Change]) -> None:
        """Does to the buffers what the step did to them, perhaps on another rank."""
        for (name,), change in changes.items():
            table, key = self._places[name]
            value = change.value.tensor if isinstance(change.value, Sent) else change.value
            before = table[key]
            if before is not None and before.shape == value.shape and before.dtype == value.dtype:
                with torch.no_grad():
                    before.copy_(value)
            else:
                table[key] = value if before is None else value.to(before.device)


def _is_another(now: Tensor, lent: Tensor, before: Version) -> bool:
    return now is not lent or version(lent) != before


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
