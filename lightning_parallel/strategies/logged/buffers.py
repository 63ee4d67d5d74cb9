"""Replicated buffers that a step changes: on microbatches, on several ranks, they change once for a batch.

Each microbatch gets copies, so that all begin with what the batch found. Floating-point buffers then become the mean of
what microbatches made of them, by samples; others, as counters, what the first one made of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_parallel.collectives.made_of import Version, version
from lightning_parallel.strategies.lightning_package import LightningModule


class BatchBuffers:
    """Buffers of a module, of which all ranks have the same, in one batch.

    Args:
        module: the user's.
        names: their FQN.
    """

    def __init__(self, module: LightningModule, names: Sequence[str] = ()) -> None:
        self._places = {name: (module.get_submodule(_owner(name))._buffers, name.rpartition(".")[2]) for name in names}
        self._before: dict[str, Tensor] = {}
        self._copies: dict[str, tuple[Tensor, Version]] = {}
        self._made: list[dict[str, Tensor]] = []

    def lend(self) -> None:
        """Put copies in their places, for one microbatch."""
        self._before, self._copies = self._now(), {}
        for name, buffer in self._before.items():
            table, key = self._places[name]
            copy = table[key] = buffer.clone()
            self._copies[name] = copy, version(copy)

    def _now(self) -> dict[str, Tensor]:
        found = {name: table.get(key) for name, (table, key) in self._places.items()}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def keep(self) -> None:
        """Keep what the microbatch made of them: it came to its end."""
        now = self._now()
        changed = {
            name
            for name, (copy, before) in self._copies.items()
            if name in now and (now[name] is not copy or version(copy) != before)
        }
        # BatchNorm's kernels write its statistics without counting that as a version, but it counts batches beside them
        owners = {_owner(name) for name in changed}
        self._made.append(
            {
                name: buffer.detach()
                for name, buffer in now.items()
                if name in changed
                or (name in self._before and _owner(name) in owners and not torch.equal(buffer, self._before[name]))
            }
        )

    def undo(self) -> None:
        """Put the buffers back."""
        for name, buffer in self._before.items():
            table, key = self._places[name]
            table[key] = buffer

    def combined(self, sizes: Sequence[int]) -> dict[str, Tensor]:
        """The buffers that changed, on the host.

        Args:
            sizes: the samples of each microbatch that was kept.
        """
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for made in self._made for name in made):
            values = [made.get(name, self._before[name]) for made in self._made]
            alike = len({value.shape for value in values}) == 1
            if alike and len(values) > 1 and values[0].is_floating_point():
                weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
                mean = torch.tensordot(weights, torch.stack([value.cpu().double() for value in values]), 1)
                found[name] = mean.to(values[0].dtype)
            else:
                found[name] = values[0].cpu()
        return found

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Put values in the buffers, as `combined` returned them, perhaps on another rank."""
        for name, value in values.items():
            table, key = self._places[name]
            before = table.get(key)
            if before is not None and before.shape == value.shape and before.dtype == value.dtype:
                with torch.no_grad():
                    before.copy_(value)
            else:
                table[key] = value if before is None else value.to(before.device)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
