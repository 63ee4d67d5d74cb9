"""Replicated buffers that a step changes: on microbatches, on several ranks, they change once for a batch.

Each microbatch gets copies, so that all begin with what the batch found. Floating-point buffers then become the mean of
what microbatches made of them, by samples; others, as counters, what the first one made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_parallel.collectives.made_of import version
from lightning_parallel.strategies.lightning_package import LightningModule


class BatchBuffers:
    """Buffers of a module, of which all ranks have the same, in one batch.

    Args:
        module: the user's.
        names: their FQN.
    """

    def __init__(self, module: LightningModule, names: Sequence[str] = ()) -> None:
        split = {name: name.rpartition(".")[::2] for name in names}
        self._places = {name: (module.get_submodule(owner)._buffers, key) for name, (owner, key) in split.items()}
        self._owners = {name: owner for name, (owner, _) in split.items()}
        self._before: dict[str, Tensor] = {}
        self._made: list[dict[str, Tensor]] = []

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Inside, copies are in their places; what became of them is kept where no exception leaves this."""
        before = self._before = self._now()
        copies = {name: buffer.clone() for name, buffer in before.items()}
        versions = {name: version(copy) for name, copy in copies.items()}
        self._set(copies)
        try:
            yield
            now = self._now()
            kept = copies.keys() & now.keys()
            changed = {name for name in kept if now[name] is not copies[name] or version(now[name]) != versions[name]}
            # BatchNorm's kernels write its statistics without counting that as a version, but count batches beside them
            owners = {self._owners[name] for name in changed}
            beside = [name for name in kept if self._owners[name] in owners]
            changed |= {name for name in beside if not torch.equal(now[name], before[name])}
            self._made.append({name: buffer.detach() for name, buffer in now.items() if name in changed})
        finally:
            self._set(before)

    def _now(self) -> dict[str, Tensor]:
        found = {name: table.get(key) for name, (table, key) in self._places.items()}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def _set(self, buffers: Mapping[str, Tensor]) -> None:
        for name, buffer in buffers.items():
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
            found[name] = values[0].cpu()
            if len({value.shape for value in values}) == 1 < len(values) and values[0].is_floating_point():
                weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
                mean = torch.tensordot(weights, torch.stack([value.cpu().double() for value in values]), 1)
                found[name] = mean.to(values[0].dtype)
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
