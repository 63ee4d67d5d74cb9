"""Rows of parameters: those that a rank keeps, and how those of all ranks become the whole again."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_parallel.collectives.functional import All, Pending, Waitable, all_gather
from lightning_parallel.mesh import place_in
from lightning_parallel.techniques.tools.shards import divided_again, local

IN_PLACE_BYTES = 2**20
"""From this size on a parameter's rows are gathered where they lie; smaller ones travel together, beside them."""


class RowShard:
    """The rows of one parameter that one rank of a mesh keeps.

    In flat memory rank k's rows are the elements [k c, (k + 1) c), where c holds ceil(rows / ranks) rows; the last
    ranks may have fewer, or none.
    """

    def __init__(self, parameter: nn.Parameter, mesh: DeviceMesh, offload: bool) -> None:
        self.parameter, self.mesh, self.offload = parameter, mesh, offload
        kept = local(parameter.detach())
        self.shape, self.row = kept.shape, kept.numel() // kept.shape[0]
        self.chunk = ceil(kept.shape[0] / mesh.size()) * self.row
        self.start = min(place_in(mesh) * self.chunk, kept.numel())
        self.stop = min(self.start + self.chunk, kept.numel())
        self.numel = self.stop - self.start
        """The number of elements that this rank keeps."""
        self._full = kept.numel() // self.chunk  # ranks whose chunks have no padding
        self.even = kept.numel() == self.chunk * mesh.size()
        self.gathers_in_place = self.even and kept.nbytes >= IN_PLACE_BYTES
        """Whether the rows of all ranks are gathered where they belong, with no message beside the parameter."""

        self._stored: DTensor | None = None
        self._rows: Tensor | None = None
        self.targets: list[Tensor] = []  # the rows of ranks with full chunks, (ranks, chunk), and the rest
        self._address = self._own_views = 0

    def as_dtensor(self, flat: Tensor) -> DTensor:
        """A flat piece of this rank's elements, as the sharded form of a tensor with the parameter's shape."""
        rows = flat.view(self.numel // self.row, *self.shape[1:])
        return divided_again(rows, self.mesh, self.parameter)

    def stored(self) -> DTensor:
        """This rank's rows in the parameter's own memory, or their copy on the host."""
        kept: Any = self.parameter
        address = (kept._local_tensor if isinstance(kept, DTensor) else kept).data_ptr()
        if self._stored is None or address != self._address:
            # made anew where the memory was replaced, as `module.to` does
            self._stored, self._rows, self.targets = None, None, []
            before, flat, full = users_of(self.parameter), local(self.parameter.detach()).view(-1), self._full
            own = flat[self.start : self.stop]
            self._stored = self.as_dtensor(own.to("cpu", copy=True) if self.offload else own)
            self._rows, self._address = self._stored._local_tensor.view(-1), address
            self.targets = [flat[: full * self.chunk].view(full, self.chunk), flat[full * self.chunk :]]
            del flat, own  # they use the memory until then
            self._own_views = users_of(self.parameter) - before
        return self._stored

    def rows(self) -> Tensor:
        """What is stored, flat and plain."""
        self.stored()
        assert self._rows is not None
        return self._rows

    @property
    def has_aliases(self) -> bool:
        """Whether somebody uses the parameter's memory through another tensor."""
        return users_of(self.parameter) > 1 + self._own_views

    def copy_whole(self, source: Tensor, chunks: Tensor, scale: float) -> None:
        """Lays the whole tensor out as the chunks of all ranks, (ranks, chunk), the last ones padded with zeros."""
        if self.even:
            torch.mul(source.reshape(chunks.shape), scale, out=chunks)
            return
        flat, full = source.reshape(-1), self._full
        torch.mul(flat[: full * self.chunk].view(full, self.chunk), scale, out=chunks[:full])
        if full < chunks.shape[0]:
            rest = flat[full * self.chunk :]
            chunks[full:].zero_()
            chunks[full, : rest.numel()] = rest * scale


def gather_rows(shards: Sequence[RowShard], group: dist.ProcessGroup) -> tuple[Waitable, int]:
    """Starts to gather what all ranks of a group stored of some parameters into these.

    Returns:
        Waiting for the first fills the parameters; the second is the bytes of what lies beside them until then.
    """
    pending: list[Waitable] = []
    small: list[RowShard] = []
    for shard in shards:
        if not shard.gathers_in_place:
            small.append(shard)
            continue
        flat = local(shard.parameter.detach()).view(-1)  # the parameter's own memory
        own = flat[shard.start : shard.stop]
        if shard.offload:
            own.copy_(shard.rows())
        pending.append(all_gather(flat, own, group))
    if not small:
        return All(pending), 0
    sizes = [shard.chunk for shard in small]
    together = local(small[0].parameter).new_empty(group.size(), sum(sizes))  # [ranks, chunks]
    own = together[group.rank()]
    slots = zip(small, torch.split(own, sizes), strict=True)
    torch._foreach_copy_([slot[: shard.numel] for shard, slot in slots], [shard.rows() for shard in small])

    def unpack() -> None:
        targets, sources = list[Tensor](), list[Tensor]()
        for shard, chunks in zip(small, torch.split(together, sizes, dim=1), strict=True):
            full, rest = shard.targets
            targets.append(full)
            sources.append(chunks[: len(full)])
            if not shard.even:  # the last rank that has rows has fewer, and those after it none
                targets.append(rest)
                sources.append(chunks[len(full), : len(rest)])
        torch._foreach_copy_(targets, sources)

    return All([*pending, Pending(all_gather(together, own, group), unpack)]), together.nbytes


def users_of(tensor: Tensor) -> int:
    """How many tensors use the memory of a tensor."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # `storage` itself
