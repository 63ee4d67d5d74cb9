"""Buffers that a model changes while it trains, such as BatchNorm's running statistics, alike on all ranks again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_parallel.collectives.functional import broadcast_tensors
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.techniques.tools.telling import warn


class Buffers:
    """Knows which buffers changed since ranks last had the same ones.

    Each rank computes them from its own samples. What evaluation reads and a checkpoint holds is their mean over the
    ranks that read different samples; counters and flags are those of the first of these ranks. Statistics of norms are
    meant to be means; of others that differ, as a queue of samples does, a warning tells.

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
        self._told: set[str] = set()

    @torch.no_grad()
    def unite(self) -> None:
        """Gives all ranks the same buffers; all must call."""
        # BatchNorm's kernels write its statistics without counting that as a version; its counter of batches does
        # count, so one changed buffer stands for all of its module.
        buffers, versions, differ = dict(self._module.named_buffers()), self._versions(), set[str]()
        owners = set[str]()
        for name, (buffer, version) in versions.items():
            known, number = self._known.get(name, (None, 0))
            if known is not buffer or number != version:
                owners.add(_owner(name))
        changed = set().union(*gather_objects({name for name in buffers if _owner(name) in owners}, self._host))
        # in a pipeline, perhaps, only buffers of other stages changed; readers of one stage have the same
        tensors = {name: buffer for name, buffer in buffers.items() if name in changed}
        devices = [tensor.device for tensor in tensors.values()]
        device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        if floats := {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}:
            # In double precision the mean of equal values is that value, however many ranks there are.
            flat = torch.cat([tensor.reshape(-1).to(device, torch.float64) for tensor in floats.values()])
            dist.all_reduce(flat, group=self._readers)
            means = torch.split(flat.div_(self._readers.size()), [tensor.numel() for tensor in floats.values()])
            for (name, tensor), mean in zip(floats.items(), means, strict=True):
                if not torch.equal(tensor, united := mean.view_as(tensor).to(tensor)):
                    tensor.copy_(united)
                    differ.add(name)
        if others := {name: tensor for name, tensor in tensors.items() if name not in floats}:
            before = {name: tensor.clone() for name, tensor in others.items()}
            # counters and flags: those of the first reader
            broadcast_tensors([*others.values()], self._readers, device)
            differ |= {name for name, tensor in others.items() if not torch.equal(tensor, before[name])}
        self._known = self._versions()
        if changed:
            own = {name for name in differ if not isinstance(self._module.get_submodule(_owner(name)), _NormBase)}
            of_all = set().union(*gather_objects(own, self._host))
            new, self._told = sorted(of_all - self._told), self._told | of_all
            if new:
                warn(
                    f"Each rank changed these buffers by its own samples: {', '.join(new)}. From here on all have the "
                    "mean over the ranks, or what is no floating-point number of the first one, as evaluation and "
                    "checkpoints do; one device would have changed them by the whole batch. Let the step see all "
                    "samples where it changes them (self.all_gather), and all ranks change them alike"
                )

    def _versions(self) -> dict[str, tuple[Tensor, int]]:
        return {name: (buffer, buffer._version) for name, buffer in self._module.named_buffers()}


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
