"""The tokens that a rank sends to experts, and their routes: which rows go to which rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.by_elements import joined, part
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.rows import told
from lightning_parallel.techniques.divided.table import Cuts
from lightning_parallel.techniques.divided.tensor import Divided, is_divided, own_of
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


# ---------------------------------------------------------------- a rank's own tokens


@dataclass(frozen=True)
class Tokens:
    """A rank's own tokens in one call of experts.

    Attributes:
        hidden: (tokens, features).
        index: the experts that each chose, (tokens, k).
        weights: of these, (tokens, k).
        summands: over how many ranks of those whose gradients are averaged the tokens are divided, so that what each
            computes is a summand of a gradient.
        back: from what experts made of own tokens, (tokens, features), what the call returns.
    """

    hidden: Tensor
    index: Tensor
    weights: Tensor
    summands: int
    back: Callable[[Tensor], Tensor]


def own_tokens(hidden: Tensor, index: Tensor, weights: Tensor, alike: Ranks | None) -> Tokens:
    """Takes a rank's own tokens: its part of what ranks have divided, and its share of what they have alike.

    Args:
        hidden: (..., features), plain or divided.
        index: (..., k).
        weights: (..., k).
        alike: ranks that have the same tokens unless they divided them, and share the work on these; None: nobody.
    """
    cuts = _cuts_of_tokens(hidden)
    hidden = own_of(hidden, cuts)
    index, weights = (own_of(each, cuts) for each in (index, weights))
    leading = hidden.shape[:-1]
    hidden, index, weights = (each.reshape(-1, each.shape[-1]) for each in (hidden, index, weights))
    ranks = {id(elements.ranks): elements.ranks for elements in cuts.values()}.values()
    shares = None
    if alike is not None and not any(each.name == alike.name for each in ranks):
        shares = alike.chunks(len(hidden))
        hidden, index, weights = (part(each, 0, shares) for each in (hidden, index, weights))

    def back(made: Tensor) -> Tensor:
        made = made if shares is None else joined(made, 0, shares)
        made = made.reshape(*leading, made.shape[-1])
        return Divided(made, cuts) if cuts else made

    return Tokens(hidden, index, weights, prod(each.count for each in ranks if each.averages), back)


def _cuts_of_tokens(hidden: Tensor) -> Cuts:
    """The dimensions of tokens that are divided; none where features are, or ranks have copies."""
    if not is_divided(hidden):
        return {}
    by_tokens = all(dim < hidden.dim() - 1 and elements.disjoint for dim, elements in hidden.cuts.items())
    return hidden.cuts if by_tokens else {}
