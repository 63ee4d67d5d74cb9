"""Tensors that go from one rank to another over gloo, which reaches the memory of the host alone.

What lies on a device is copied to pinned memory, travels, and is copied back where it arrives, in the order of the
stream that is current when it is waited for. Gloo's own collectives do so by themselves; its messages from rank to rank
do not. So ranks can share one GPU, which NCCL refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Arrival:
    """A message that fills a tensor when it is waited for."""

    def __init__(self, work: dist.Work, room: Tensor, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor
        self._room: Tensor | None = room

    def wait(self) -> None:
        """Returns when what follows on the current stream finds the tensor filled."""
        if self._room is None:
            return
        self._work.wait()
        if self._room is not self._tensor:
            bring(self._room, self._tensor.detach())
        self._room = None


def send(sent: Mapping[int, Tensor], group: dist.ProcessGroup, tag: int = 0) -> list[dist.Work]:
    """Starts to send each rank of a gloo group a contiguous tensor; those on a device may change afterwards."""
    return [group.send([tensor], rank, tag) for rank, tensor in zip(sent, on_host(list(sent.values())), strict=True)]


def receive(tensor: Tensor, rank: int, group: dist.ProcessGroup, tag: int = 0) -> Arrival:
    """Starts to fill a contiguous tensor with what a rank of a gloo group sends."""
    room = tensor if lies_on_host(tensor) else room_for(tensor)
    return Arrival(group.recv([room], rank, tag), room, tensor)


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with their values in the memory of the host, each copied once, when all that was to be done is."""
    if all(map(lies_on_host, tensors)):
        return list(tensors)
    seen = {tensor: tensor if lies_on_host(tensor) else taken(tensor) for tensor in dict.fromkeys(tensors)}
    for device in {tensor.device for tensor, copy in seen.items() if copy is not tensor}:
        finish(device)
    return [seen[tensor] for tensor in tensors]


def lies_on_host(tensor: Tensor) -> bool:
    """Whether gloo can read and write it."""
    return tensor.is_cpu


# ---------------------------------------------------------------- copies, in the order of the device's current stream


def room_for(tensor: Tensor) -> Tensor:
    """Memory of the host for a tensor, which the device can read and write by itself."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def taken(tensor: Tensor) -> Tensor:
    """Starts to copy to the host. ⇄ `bring`."""
    return room_for(tensor).copy_(tensor.detach(), non_blocking=True)


def bring(room: Tensor, tensor: Tensor) -> None:
    """Starts to copy from the host. Torch's allocator gives pinned memory to nobody else before that is over."""
    tensor.copy_(room, non_blocking=True)


def finish(device: torch.device) -> None:
    """Waits until the copies that were started are over."""
    torch.accelerator.current_stream(device).synchronize()
