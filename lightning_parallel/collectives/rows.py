"""Rows that go to other ranks, as many to each as its owner says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.functional import Pending, exchange, uses_exchange


def start_exchange(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> tuple[Tensor, Pending]:
    """Starts to send each rank of a group its rows, and to receive theirs.

    Args:
        rows: those for rank 0, then those for rank 1, ..., (sum of sent, ...); they stay as they are until arrival.
        sent: how many go to each rank, this one included.
        received: how many come from each.
        group: of the ranks.

    Returns:
        What comes, from rank 0, rank 1, ..., (sum of received, ...), and when it is there.
    """
    rows = rows.contiguous()
    arriving = rows.new_empty(sum(received), *rows.shape[1:])
    if not uses_exchange(group):
        work = dist.all_to_all_single(arriving, rows, list(received), list(sent), group=group, async_op=True)
        return arriving, Pending(work)
    outgoing, incoming = torch.split(rows, list(sent)), torch.split(arriving, list(received))
    own, others = group.rank(), [rank for rank in range(group.size()) if rank != group.rank()]
    pending = exchange(
        {rank: outgoing[rank] for rank in others if outgoing[rank].numel()},
        {rank: incoming[rank] for rank in others if incoming[rank].numel()},
        group,
    )
    incoming[own].copy_(outgoing[own])
    return arriving, pending


def exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """What `start_exchange` returns, once it is there."""
    arriving, pending = start_exchange(rows, sent, received, group)
    pending.wait()
    return arriving


def told(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What each rank says to this one, when this one says `row[r]` to rank r: (ranks, ...) -> (ranks, ...)."""
    each = [1] * group.size()
    return exchanged(row, each, each, group)


def any_of(flag: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether it is so on some rank of the group."""
    count = torch.tensor(float(flag), device=device)
    dist.all_reduce(count, group=group)
    return count.item() > 0
