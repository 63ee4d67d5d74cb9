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

    def unite(self) -> None:
        """Gives all ranks the same buffers; all must call."""
        changed = set().union(*gather_objects(self._changed(), self._host))
        tensors = {name: buffer for name, buffer in self._module.named_buffers() if name in changed}
        differ: set[str] = set()
        if tensors:  # in a pipeline, perhaps, only those of other stages changed; readers of one stage have the same
            devices = [tensor.device for tensor in tensors.values()]
            device = next((device for device in devices if device.type != "cpu"), devices[0])
            with torch.no_grad():
                differ = self._average({name: tensor for name, tensor in tensors.items() if _has_mean(tensor)}, device)
                differ |= self._share(
                    {name: tensor for name, tensor in tensors.items() if not _has_mean(tensor)}, device
                )
        self._known = self._versions()
        if changed:
            own = {name for name in differ if not self._is_statistic(name)}
            self._tell(set().union(*gather_objects(own, self._host)))

    def _is_statistic(self, name: str) -> bool:
        return isinstance(self._module.get_submodule(_owner(name)), _NormBase)

    def _tell(self, differ: set[str]) -> None:
        new, self._told = sorted(differ - self._told), self._told | differ
        if new:
            warn(
                f"Each rank changed these buffers by its own samples: {', '.join(new)}. From here on all have the mean "
                "over the ranks, or what is no floating-point number of the first one, as evaluation and checkpoints "
                "do; one device would have changed them by the whole batch. Let the step see all samples where it "
                "changes them (self.all_gather), and all ranks change them alike"
            )

    def _average(self, tensors: dict[str, Tensor], device: torch.device) -> set[str]:
        if not tensors:
            return set()
        # In double precision the mean of equal values is that value, however many ranks there are.
        flat = torch.cat([tensor.reshape(-1).to(device, torch.float64) for tensor in tensors.values()])
        dist.all_reduce(flat, group=self._readers)
        means = torch.split(flat.div_(self._readers.size()), [tensor.numel() for tensor in tensors.values()])
        differ = set()
        for (name, tensor), mean in zip(tensors.items(), means, strict=True):
            if not torch.equal(tensor, united := mean.view_as(tensor).to(tensor)):
                tensor.copy_(united)
                differ.add(name)
        return differ

    def _share(self, tensors: dict[str, Tensor], device: torch.device) -> set[str]:
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        broadcast_tensors([*tensors.values()], self._readers, device)
        return {name for name, tensor in tensors.items() if not torch.equal(tensor, before[name])}

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
