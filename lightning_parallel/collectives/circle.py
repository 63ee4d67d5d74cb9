"""Some ranks of a group, among which messages go round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.functional import Pending, exchange


@dataclass(frozen=True)
class Circle:
    """Ranks of a group in some order.

    Args:
        group: the process group.
        members: its ranks that take part.
    """

    group: dist.ProcessGroup
    members: tuple[int, ...]

    @property
    def place(self) -> int:
        """Of this rank among the members."""
        return self.members.index(self.group.rank())

    def __len__(self) -> int:
        return len(self.members)

    def at(self, distance: int) -> int:
        """The place of the member that comes so many places after this one."""
        return (self.place + distance) % len(self.members)

    def exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> Pending:
        """Starts to send and to receive tensors, by the places of members; empty ones do not travel."""
        return exchange(
            {self.members[place]: tensor for place, tensor in sent.items() if tensor.numel()},
            {self.members[place]: tensor for place, tensor in received.items() if tensor.numel()},
            self.group,
        )

    def told(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all members, of one shape, in the order of their places."""
        found = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in self.members]
        found[self.place].copy_(tensor)
        others = [place for place in range(len(self)) if place != self.place]
        self.exchange(dict.fromkeys(others, found[self.place]), {place: found[place] for place in others}).wait()
        return found
