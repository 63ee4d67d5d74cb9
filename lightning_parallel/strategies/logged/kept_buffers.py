"""Buffers that a step changes: a step that runs in parts, on several ranks, changes them once for a batch.

Each part gets copies, so that all begin with what the batch found. What parts make of them is put together as other
values that a step keeps, and goes into the buffers of every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_parallel.strategies.logged.kept_values import Change, Path, Sent


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
            owner, _, key = name.rpartition(".")
            self._places[name] = module.get_submodule(owner)._buffers, key
        self._before: dict[str, Tensor] = {}
        self._lent: dict[str, tuple[Tensor, int]] = {}

    def lend(self) -> list[Tensor]:
        """Puts copies in their places."""
        found = {name: table.get(key) for name, (table, key) in self._places.items()}
        self._before = {name: buffer for name, buffer in found.items() if buffer is not None}
        for name, buffer in self._before.items():
            table, key = self._places[name]
            copy = table[key] = buffer.clone()
            self._lent[name] = copy, _version(copy)
        return [copy for copy, _ in self._lent.values()]

    def changes(self) -> dict[Path, Change]:
        """What became of the copies that changed."""
        found: dict[Path, Change] = {}
        for name, before in self._before.items():
            table, key = self._places[name]
            now, (copy, version) = table.get(key), self._lent[name]
            if now is not None and (now is not copy or _version(copy) != version):
                found[BufferName(name),] = Change(now.detach(), before)
        return found

    def undo(self) -> None:
        """Puts the buffers back."""
        for name, buffer in self._before.items():
            table, key = self._places[name]
            table[key] = buffer

    def keep(self, changes: Mapping[Path, Change]) -> None:
        """Does to the buffers what the step did to them, perhaps on another rank."""
        for (name,), change in changes.items():
            table, key = self._places[name]
            before, value = table[key], change.value.tensor if isinstance(change.value, Sent) else change.value
            if before is not None and before.shape == value.shape and before.dtype == value.dtype:
                with torch.no_grad():
                    before.copy_(value)
            else:
                table[key] = value if before is None else value.to(before.device)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
