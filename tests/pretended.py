"""Tensors of the host that messages take for those of a device whose copies are late.

What is copied from the device is there only when the device has finished; until then the memory of the host holds
other values, which arrive at a rank that is sent too early.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

from lightning_parallel.collectives import messages

WRONG = 77


@dataclass
class Device:
    """Counts the copies of each kind, and those that are under way."""

    to_host: int = 0
    to_device: int = 0
    late: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def take(self, tensor: Tensor) -> Tensor:
        self.to_host += 1
        room = torch.full(tensor.shape, WRONG, dtype=tensor.dtype)
        self.late.append((room, tensor.detach()))
        return room

    def bring(self, room: Tensor, tensor: Tensor) -> None:
        self.to_device += 1
        tensor.copy_(room)

    def finish(self, _: torch.device) -> None:
        for room, tensor in self.late:
            room.copy_(tensor)
        self.late.clear()


@contextmanager
def pretended_device() -> Iterator[Device]:
    """Inside, messages from rank to rank go through copies, as those of a GPU do over gloo."""
    device = Device()
    acts = {"taken": device.take, "bring": device.bring, "finish": device.finish}
    with mock.patch.multiple(messages, lies_on_host=lambda _: False, **acts):
        yield device
