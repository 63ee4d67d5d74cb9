"""Averages over ranks the buffers that a model changes while it trains, such as BatchNorm's running statistics."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_parallel.collectives.functional import broadcast_tensors
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.techniques.tools.user_warnings import warn


class Buffers:
    """Tracks which buffers changed since all ranks last had the same ones.

    Each rank updates buffers by its own samples. Before evaluation and checkpoints, a floating-point buffer becomes the
    mean over the ranks that read different samples; other buffers, e.g. counters and flags, are copied from the first
    of these ranks. Statistics of norms are meant to be means; for other buffers that differ between ranks, such as a
    queue of samples, a warning is issued.

    Args:
        module: the user's module.
        readers: the ranks that read different samples.
        host: all ranks; the group sends from host memory.
    """

    def __init__(self, module: nn.Module, readers: dist.ProcessGroup, host: dist.ProcessGroup) -> None:
        self._module = module
        self._readers = readers
        self._host = host
        self._known = self._versions()
        self._told: set[str] = set()

    @torch.no_grad()
    def unite(self) -> None:
        """Give all ranks the same buffers. Collective over all ranks."""
        # BatchNorm's kernels write its statistics without a new version, but its counter of batches gets one: if one
        # buffer has changed, all buffers of its module count as changed.
        buffers, versions, differ = dict(self._module.named_buffers()), self._versions(), set[str]()
        owners = set[str]()
        for name, (buffer, version) in versions.items():
            known, number = self._known.get(name, (None, 0))
            if known is not buffer or number != version:
                owners.add(_owner(name))
        changed = set().union(*gather_objects({name for name in buffers if _owner(name) in owners}, self._host))
        # empty if only buffers of other pipeline stages changed; the ranks in `readers` hold the same stage
        tensors = {name: buffer for name, buffer in buffers.items() if name in changed}
        devices = [tensor.device for tensor in tensors.values()]
        device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        if floats := {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}:
            # In double precision the mean of equal values is exactly that value, for any number of ranks.
            flat = torch.cat([tensor.reshape(-1).to(device, torch.float64) for tensor in floats.values()])
            dist.all_reduce(flat, group=self._readers)
            means = torch.split(flat.div_(self._readers.size()), [tensor.numel() for tensor in floats.values()])
            for (name, tensor), mean in zip(floats.items(), means, strict=True):
                if not torch.equal(tensor, averaged := mean.view_as(tensor).to(tensor)):
                    tensor.copy_(averaged)
                    differ.add(name)
        if others := {name: tensor for name, tensor in tensors.items() if name not in floats}:
            before = {name: tensor.clone() for name, tensor in others.items()}
            # counters and flags: copied from the first rank of `readers`
            broadcast_tensors([*others.values()], self._readers, device)
            differ |= {name for name, tensor in others.items() if not torch.equal(tensor, before[name])}
        self._known = self._versions()
        if changed:
            local = {name for name in differ if not isinstance(self._module.get_submodule(_owner(name)), _NormBase)}
            on_any = set().union(*gather_objects(local, self._host))
            new, self._told = sorted(on_any - self._told), self._told | on_any
            if new:
                warn(
                    f"Each rank changed these buffers by its own samples: {', '.join(new)}. All ranks now get their "
                    "mean, or, if they are not floating-point, the values of the first rank, as before each evaluation "
                    "and checkpoint. One device would have changed them by the whole batch. Gather all samples where "
                    "the step changes them (self.all_gather), so that the ranks stay equal"
                )

    def _versions(self) -> dict[str, tuple[Tensor, int]]:
        return {name: (buffer, buffer._version) for name, buffer in self._module.named_buffers()}


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
