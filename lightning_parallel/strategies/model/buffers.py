"""Buffers that a model changes while it trains, such as BatchNorm's running statistics, alike on all ranks again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.collectives.functional import broadcast_tensors
from lightning_parallel.strategies.ranks.agreement import gather_objects


class Buffers:
    """Knows which buffers changed since ranks last had the same ones.

    Each rank computes them from its own samples. What evaluation reads and a checkpoint holds is their mean over the
    ranks that read different samples; counters and flags are those of the first of these ranks.

    Args:
        module: the user's module.
        readers: the ranks that read different samples.
        host: all ranks, for messages of the host.
    """

    def __init__(self, module: nn.Module, readers: dist.ProcessGroup, host: dist.ProcessGroup) -> None:
        self._module = module
        self._readers = readers
        self._host = host
        self._known = self._versions()

    def unite(self) -> None:
        """Gives all ranks the same buffers; all must call."""
        changed = set().union(*gather_objects(self._changed(), self._host))
        tensors = [buffer for name, buffer in self._module.named_buffers() if name in changed]
        if tensors:  # in a pipeline, perhaps, only those of other stages changed; readers of one stage have the same
            device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
            with torch.no_grad():
                self._average([tensor for tensor in tensors if _has_mean(tensor)], device)
                broadcast_tensors([tensor for tensor in tensors if not _has_mean(tensor)], self._readers, device)
        self._known = self._versions()

    def _average(self, tensors: list[Tensor], device: torch.device) -> None:
        if not tensors:
            return
        # In double precision the mean of equal values is that value, however many ranks there are.
        flat = torch.cat([tensor.reshape(-1).to(device, torch.float64) for tensor in tensors])
        dist.all_reduce(flat, group=self._readers)
        means = torch.split(flat.div_(self._readers.size()), [tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.view_as(tensor))

    def _versions(self) -> dict[str, tuple[Tensor, int]]:
        return {name: (buffer, buffer._version) for name, buffer in self._module.named_buffers()}

    def _changed(self) -> set[str]:
        # BatchNorm's kernels write its statistics without counting that as a version; its counter of batches does
        # count, so one changed buffer stands for all of its module.
        owners = {_owner(name) for name, now in self._versions().items() if not _same(self._known.get(name), now)}
        return {name for name, _ in self._module.named_buffers() if _owner(name) in owners}


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _same(before: tuple[Tensor, int] | None, now: tuple[Tensor, int]) -> bool:
    return before is not None and before[0] is now[0] and before[1] == now[1]


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point()
