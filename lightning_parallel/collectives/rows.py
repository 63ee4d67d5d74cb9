"""Rows that go to other ranks, as many to each as its owner says; and the samples of all ranks. With gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.collectives.by_elements import gathered
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.functional import filled, parts_of_all, room_for, sendable, within_reach


def exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sends each rank of a group its rows, and returns theirs: from rank 0, rank 1, ..., [sum of received, ...].

    Args:
        rows: those for rank 0, then those for rank 1, ..., [sum of sent, ...].
        sent: how many go to each rank, this one included.
        received: how many come from each.
        group: of the ranks. Collective over it.
    """
    arriving = rows.new_empty(sum(received), *rows.shape[1:])
    room = room_for(arriving, group)
    work = dist.all_to_all_single(
        room, sendable(rows.contiguous(), group), list(received), list(sent), group=group, async_op=True
    )
    assert work is not None  # this rank is in the group
    filled(work, [(room, arriving)]).wait()
    return arriving


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """`exchanged`, whose gradients take the way back; differentiable any number of times. Collective over the group."""
    arrived: Tensor = _AllToAll.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return arrived


def rows_of_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' tensors as (ranks, *shape); where their numbers of rows differ, as (1, rows of all ranks, *shape[1:]).

    So `.flatten(0, 1)`, `.view(-1, features)` and `.mean()` are right for both. E.g. ranks with shapes [11, 3] and
    [10, 3] get [1, 21, 3]. Collective over `group`, as is its backward.

    Raises:
        ValueError: on all ranks, if shapes differ in more than the number of rows, or dtypes do.
    """
    if tensor.is_meta:
        return of_all(tensor, group)
    rest = f"{tensor.dtype} with {tensor.dim()} dimensions, of which {[*tensor.shape[1:]]} follow the first"
    rows = tensor.shape[0] if tensor.dim() else 1
    numbers = torch.tensor([rows, crc32(rest.encode())])
    sizes, rests = parts_of_all(within_reach(numbers, group), group).T.tolist()
    if len({*rests}) > 1:
        said: list[Any] = [None] * group.size()
        dist.all_gather_object(said, f"{tensor.dtype} of shape {[*tensor.shape]}", group=group)
        raise ValueError(
            f"all_gather gets tensors that differ among ranks in more than the number of rows: {'; '.join(said)}; pad "
            "them to one shape first, as by torch.nn.functional.pad, or gather objects by torch.distributed"
        )
    if len({*sizes}) == 1:
        return of_all(tensor, group)
    padded = F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, max(sizes) - rows))
    of_ranks = of_all(padded, group).unbind()
    return torch.cat([each[:size] for each, size in zip(of_ranks, sizes, strict=True)])[None]


def of_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' tensors, (ranks, *shape); the gradient of each is summed over the ranks that use it.

    Torch's own (`torch.distributed.nn.functional.all_gather`) goes back to ranks of the world, not of the group.
    """
    if not tensor.numel():
        return tensor.expand(group.size(), *tensor.shape)
    return gathered(tensor[None], 0, Ranks(group, "samples").chunks(group.size()))
