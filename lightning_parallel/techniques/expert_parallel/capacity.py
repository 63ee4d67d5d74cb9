"""How many tokens an expert takes. By default all that choose it; with a capacity the first ones of the batch.

Source: D. Lepikhin et al., GShard, ICLR 2021; W. Fedus et al., Switch Transformers, JMLR 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.functional import parts_of_all


@dataclass(frozen=True)
class Room:
    """What experts have left for one rank in one call.

    Attributes:
        pairs: how many of this rank's pairs of a token and an expert each expert takes, (experts,); 0 or less: none.
        dropped: the share of the pairs of all ranks that are left out, a tensor without dimensions.
    """

    pairs: Tensor
    dropped: Tensor


class Capacity:
    """A limit on the tokens that choose one expert in one call.

    Of `n` tokens on all ranks that choose `k` of `e` experts each, every expert takes `ceil(factor * n * k / e)`: the
    first in the order of ranks and of their tokens. What is dropped adds nothing to what the experts return.

    Args:
        factor: see above; None for no limit.
        group: all ranks whose tokens count, and that have different ones.
    """

    def __init__(self, factor: float | None, group: dist.ProcessGroup) -> None:
        self.factor, self.group = factor, group

    def room(self, counts: Tensor) -> Room:
        """What is left for this rank, of whose pairs so many choose each expert, and the last of `counts` none."""
        assert self.factor is not None
        all_counts = parts_of_all(counts, self.group)
        chosen = all_counts[:, :-1].sum(0)
        limit = (all_counts.sum().double() * self.factor / len(chosen)).ceil()
        dropped = (chosen - limit).clamp(min=0).sum() / chosen.sum().clamp(min=1)
        return Room(limit - all_counts[: self.group.rank(), :-1].sum(0), dropped)

    def limited(self, index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        """The experts that each token chose, (tokens, k), -1 for those that have no room; and the share of these."""
        flat = index.reshape(-1)
        flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
        counts = flat.new_zeros(experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
        room = self.room(counts)
        order = flat.argsort(stable=True)
        place = torch.empty_like(flat)
        place[order] = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[flat[order]]
        fits = torch.cat((room.pairs, room.pairs.new_zeros(1)))[flat] > place
        return torch.where(fits, flat, -1).view_as(index), room.dropped
