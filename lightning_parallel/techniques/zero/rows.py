"""Rows of parameters: those that a rank keeps, and how those of all ranks become the whole again."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_parallel.collectives.functional import All, Pending, Waitable, all_gather, all_gather_rows, uses_exchange
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
        self.start = min(mesh.get_local_rank() * self.chunk, kept.numel())
        self.stop = min(self.start + self.chunk, kept.numel())
        self._even = kept.numel() == self.chunk * mesh.size()
        self._large = kept.nbytes >= IN_PLACE_BYTES
        self._stored: DTensor | None = None
        self._targets: list[Tensor] = []
        self._address = self._own_views = 0

    @property
    def numel(self) -> int:
        """The number of elements that this rank keeps."""
        return self.stop - self.start

    def as_dtensor(self, flat: Tensor) -> DTensor:
        """A flat piece of this rank's elements, as the sharded form of a tensor with the parameter's shape."""
        rows = flat.view(self.numel // self.row, *self.shape[1:])
        return divided_again(rows, self.mesh, self.parameter)

    def stored(self) -> DTensor:
        """This rank's rows in the parameter's own memory, or their copy on the host."""
        if self._stored is None or (not self.offload and local(self.parameter).data_ptr() != self._address):
            self._stored, self._targets = None, []  # made anew where the memory was replaced, as `module.to` does
            before = users_of(self.parameter)
            self._stored = self._divide(local(self.parameter.detach()))
            self._own_views = users_of(self.parameter) - before
        return self._stored

    def _divide(self, kept: Tensor) -> DTensor:
        flat, full = kept.view(-1), kept.numel() // self.chunk
        current = flat[self.start : self.stop]
        self._address = kept.data_ptr()
        self._targets = [flat[: full * self.chunk].view(full, self.chunk), flat[full * self.chunk :]]
        return self.as_dtensor(current.cpu() if self.offload else current)

    @property
    def is_exposed(self) -> bool:
        """Whether somebody uses the parameter's memory through another tensor."""
        return users_of(self.parameter) > 1 + self._own_views

    def copy_whole(self, source: Tensor, chunks: Tensor, scale: float) -> None:
        """Lays the whole tensor out as the chunks of all ranks, (ranks, chunk), the last ones padded with zeros."""
        flat = source.reshape(-1)
        full = flat.numel() // self.chunk
        torch.mul(flat[: full * self.chunk].view(full, self.chunk), scale, out=chunks[:full])
        if full < chunks.shape[0]:
            rest = flat[full * self.chunk :]
            chunks[full:].zero_()
            chunks[full, : rest.numel()] = rest * scale

    def assembled_from(self, chunks: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The copies, (target, source), that fill the parameter from the chunks of all ranks."""
        whole, rest = self._targets
        if len(whole) == len(chunks):
            return [(whole, chunks)]
        return [(whole, chunks[: len(whole)]), (rest, chunks[len(whole), : len(rest)])]

    def lies_in_place(self, gathers_uneven_rows: bool) -> bool:
        """Whether the rows of all ranks are gathered where they belong, with no message beside the parameter."""
        return self._large and (self._even or gathers_uneven_rows)

    def gather_in_place(self, group: dist.ProcessGroup) -> Pending:
        """Starts to gather the rows of all ranks into the parameter's own memory."""
        flat = local(self.parameter.detach()).view(-1)
        if self.offload:
            flat[self.start : self.stop].copy_(self.stored().to_local().view(-1))
        return all_gather_rows(flat, self.chunk, group)


def gather(shards: Sequence[RowShard], group: dist.ProcessGroup) -> tuple[Waitable, int]:
    """Starts to gather what all ranks stored; waiting for it fills the parameters.

    Returns:
        What is under way, and the bytes of messages that lie beside the parameters.
    """
    uneven = uses_exchange(group)
    pending: list[Waitable] = [shard.gather_in_place(group) for shard in shards if shard.lies_in_place(uneven)]
    small = [shard for shard in shards if not shard.lies_in_place(uneven)]
    if not small:
        return All(pending), 0
    chunks = [shard.chunk for shard in small]
    whole = local(small[0].parameter.detach()).new_empty(group.size(), sum(chunks))
    own = whole[group.rank()]
    kept = [shard.stored().to_local().view(-1) for shard in small]
    torch._foreach_copy_([slot[: len(rows)] for slot, rows in zip(torch.split(own, chunks), kept, strict=True)], kept)

    def unpack() -> None:
        columns = zip(small, torch.split(whole, chunks, dim=1), strict=True)
        copies = [copy for shard, column in columns for copy in shard.assembled_from(column)]
        torch._foreach_copy_([target for target, _ in copies], [source for _, source in copies])

    return All([*pending, Pending(all_gather(whole, own, group), unpack)]), whole.nbytes


def users_of(tensor: Tensor) -> int:
    """How many tensors use the memory of a tensor."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # `storage` itself
