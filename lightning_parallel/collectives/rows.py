"""Rows that go to other ranks, as many to each as its owner says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.collectives.functional import filled, room_for, sendable


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


def told(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What each rank says to this one, when this one says `row[r]` to rank r: (ranks, ...) -> (ranks, ...)."""
    each = [1] * group.size()
    return exchanged(row, each, each, group)


def any_of(flag: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether it is so on some rank of the group."""
    count = torch.tensor(float(flag), device=device)
    dist.all_reduce(count, group=group)
    return count.item() > 0
