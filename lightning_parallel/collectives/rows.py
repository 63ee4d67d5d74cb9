"""Differentiable exchange of rows between ranks, with a number of rows for each, and gathering of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.collectives.conjugate_collectives import gathered
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.functional import (
    all_gather_stacked,
    filled,
    receive_buffer,
    sendable,
    to_group_device,
)


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send each rank of a group its rows, and return those received: of rank 0, of rank 1, ..., [sum(received), ...].

    Args:
        rows: those for rank 0, then those for rank 1, ..., [sum(sent), ...].
        sent: number of rows for each rank, this one included.
        received: number of rows from each rank.
        group: the ranks. Collective over it.
    """
    output = rows.new_empty(sum(received), *rows.shape[1:])
    buffer = receive_buffer(output, group)
    work = dist.all_to_all_single(
        buffer, sendable(rows.contiguous(), group), list(received), list(sent), group=group, async_op=True
    )
    assert work is not None  # this rank is in the group
    filled(work, [(buffer, output)]).wait()
    return output


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return exchange_rows(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Differentiable `exchange_rows`, any number of times: gradients are sent back. Collective over `group`."""
    output: Tensor = _AllToAll.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return output


def rows_of_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' tensors as [ranks, *shape]; if numbers of rows differ, as [1, rows of all ranks, *shape[1:]].

    So `.flatten(0, 1)`, `.view(-1, features)` and `.mean()` are right in both cases. E.g. ranks with shapes [11, 3] and
    [10, 3] get [1, 21, 3]. Collective over `group`, as is its backward.

    Raises:
        ValueError: on all ranks, if shapes differ in more than the number of rows, or dtypes differ.
    """
    if tensor.is_meta:
        return all_gather_differentiable(tensor, group)
    description = f"{tensor.dtype} with {tensor.dim()} dimensions, of which {[*tensor.shape[1:]]} follow the first"
    rows = tensor.shape[0] if tensor.dim() else 1
    numbers = torch.tensor([rows, crc32(description.encode())])
    sizes, checksums = all_gather_stacked(to_group_device(numbers, group), group).T.tolist()  # [2, ranks]
    if len({*checksums}) > 1:
        specs: list[Any] = [None] * group.size()
        dist.all_gather_object(specs, f"{tensor.dtype} of shape {[*tensor.shape]}", group=group)
        raise ValueError(
            f"all_gather got tensors that differ between ranks in more than the number of rows: {'; '.join(specs)}; "
            "pad them to one shape with torch.nn.functional.pad, or gather objects with torch.distributed"
        )
    if len({*sizes}) == 1:
        return all_gather_differentiable(tensor, group)
    padded = F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, max(sizes) - rows))
    tensors = all_gather_differentiable(padded, group).unbind()
    return torch.cat([rank_rows[:size] for rank_rows, size in zip(tensors, sizes, strict=True)])[None]


def all_gather_differentiable(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' tensors, [ranks, *shape]; each gradient is summed over the ranks that use the tensor.

    `torch.distributed.nn.functional.all_gather` is no replacement: its backward sends to ranks of the world, not of the
    group. Collective over `group`.
    """
    if not tensor.numel():
        return tensor.expand(group.size(), *tensor.shape)
    return gathered(tensor[None], 0, Ranks(group, "samples").chunks(group.size()))
