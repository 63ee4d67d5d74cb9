"""Routes: from the experts that tokens chose, which rows go to which rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.rows import told
from lightning_parallel.techniques.expert_parallel.calls import Calls

BITS = 32
"""Of a message the lower ones say how many pairs come, the others to which module."""


@dataclass(frozen=True)
class Route:
    """The way of one batch of tokens to the ranks of their experts. A token that chose several of a rank goes once.

    Attributes:
        token: of each row that goes, by the rank it goes to, (rows,).
        chosen: of each such row the experts that the token chose of that rank, as numbers there; -1: not there, or
            none. (rows, k)
        sent: how many rows go to each rank.
        received: how many rows come from each rank.
        pairs: how many pairs of a token and an expert come to this rank.
        group: the ranks.
    """

    token: Tensor
    chosen: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    pairs: int
    group: dist.ProcessGroup


def find_route(index: Tensor, experts: int, calls: Calls, number: int) -> Route:
    """Finds the way of tokens, and lets the ranks tell each other how many come; the one time that the host waits.

    Args:
        index: the experts that each token chose, (tokens, k); numbers outside of 0 ... experts - 1 are none.
        experts: how many there are; the ranks hold equal numbers of them, in their order.
        calls: tells whether all ranks call these experts.
        number: theirs among all modules of experts.

    Raises:
        RuntimeError: not all ranks call them.
    """
    group = calls.group
    each, ranks = experts // group.size(), group.size()
    owner = torch.where((index >= 0) & (index < experts), index.div(each, rounding_mode="floor"), ranks)
    goes = torch.zeros(len(index), ranks + 1, dtype=torch.bool, device=index.device).scatter_(1, owner, True)
    goes = goes[:, :ranks].t()
    pairs = index.new_zeros(ranks + 1).scatter_add_(0, owner.reshape(-1), torch.ones_like(owner).reshape(-1))
    counts = torch.stack([goes.sum(1), pairs[:ranks].long() + (number << BITS)], 1)
    (sent, _), (received, coming) = torch.stack([counts, told(counts, group)]).transpose(1, 2).tolist()
    calls.require(number, [each >> BITS for each in coming])
    coming = [each - (number << BITS) for each in coming]
    rank, token = torch.nonzero_static(goes, size=sum(sent)).unbind(1)
    there = torch.where(owner[token] == rank[:, None], index[token] - rank[:, None] * each, -1)
    return Route(token, there, tuple(sent), tuple(received), sum(coming), group)
