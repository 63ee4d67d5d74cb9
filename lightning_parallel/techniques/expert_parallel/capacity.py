"""How many tokens an expert takes. By default all that choose it; with a capacity the first ones of the batch.

Source: D. Lepikhin et al., GShard, ICLR 2021; W. Fedus et al., Switch Transformers, JMLR 2022.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.functional import parts_of_all


class Capacity:
    """A limit on the tokens that choose one expert in one call.

    Of `n` tokens on all ranks that choose `k` of `e` experts each, every expert takes `ceil(factor * n * k / e)`: the
    first in the order of ranks and of their tokens. What is dropped adds nothing to what the experts return.

    Args:
        factor: see above; None for no limit.
        group: all ranks whose tokens count.
    """

    def __init__(self, factor: float | None, group: dist.ProcessGroup) -> None:
        self.factor, self._group = factor, group

    def limited(self, index: Tensor, experts: int) -> Tensor:
        """The experts that each token chose, (tokens, k), -1 for those that have no room."""
        if self.factor is None:
            return index
        flat = index.reshape(-1)
        known = (flat >= 0) & (flat < experts)
        flat = torch.where(known, flat, experts)
        counts = flat.new_zeros(experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
        all_counts = parts_of_all(counts, self._group)
        total = all_counts.sum()
        order = flat.argsort(stable=True)
        place = torch.empty_like(flat)
        place[order] = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[flat[order]]
        before = all_counts[: self._group.rank()].sum(0)
        limit = (total * self.factor / experts).ceil()
        return torch.where(known & (before[flat] + place < limit), flat, -1).view_as(index)
