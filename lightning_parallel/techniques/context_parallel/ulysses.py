"""Ulysses: ranks swap positions for heads, and each computes attention of some heads over all positions.

Example: 2 ranks, 4 heads, 8 positions. Before the swap a rank has all heads of 4 positions, [B, 4, 4, D]; after it
2 heads of all positions, [B, 2, 8, D]. Queries, keys and values travel in one all_to_all, the output in another one.
Keys and values with fewer heads than ranks are repeated first, so that each rank gets the heads of its queries.
In shapes, t is the number of positions of this rank, T_team that of the team, T that of all ranks.

Source: S. A. Jacobs et al., DeepSpeed Ulysses, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.rows import all_to_all
from lightning_parallel.collectives.spans import Runs, indices, length_of


def heads_fit(heads: int, key_heads: int, size: int) -> bool:
    """Whether a team of `size` ranks can divide these heads."""
    return heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)


@dataclass(frozen=True)
class UlyssesTeam:
    """Ranks that swap positions for heads.

    Args:
        group: the process group of all ranks that shard the sequence; collectives run over it.
        members: ranks of the group in this team, ascending.
        runs: positions of each member.
    """

    group: dist.ProcessGroup
    members: tuple[int, ...]
    runs: tuple[Runs, ...]

    def seq_to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Swap positions for heads in each tensor, [B, H, t, D] -> [B, H / team, T_team, D], positions ascending.

        Collective over the group, one message for all tensors. Differentiable. The tensors have one dtype and numbers
        of heads that the team size divides.
        """
        size, t = len(self.members), tensors[0].shape[2]
        split = [torch.unflatten(each, 1, (size, -1)) for each in tensors]  # [B, team, h, t, D]
        rows = torch.cat([each.permute(1, 3, 0, 2, 4).flatten(2) for each in split], -1)  # [team, t, sum of B h D]
        received = all_to_all(
            rows.flatten(0, 1), self._of_members([t] * size), self._of_members(self._lengths), self.group
        )
        received = received.index_select(0, self._order.to(rows.device))  # [T_team, sum of B h D]
        shapes = [(each.shape[0], each.shape[2], each.shape[4]) for each in split]
        parts = torch.split(received, [*map(prod, shapes)], -1)
        return [torch.unflatten(part, 1, shape).permute(1, 2, 0, 3) for part, shape in zip(parts, shapes, strict=True)]

    def heads_to_seq(self, out: Tensor) -> Tensor:
        """Swap back, [B, H / team, T_team, D] -> [B, H, t, D]. Differentiable. Collective over the group."""
        b, h, _, d = out.shape
        size, t = len(self.members), self._lengths[self.members.index(self.group.rank())]
        rows = out.permute(2, 0, 1, 3).flatten(1).index_select(0, self._order.argsort().to(out.device))
        received = all_to_all(rows, self._of_members(self._lengths), self._of_members([t] * size), self.group)
        # Memory order [B, t, H, D], as torch's attention returns it: models merge the heads next, without a copy.
        return received.view(size, t, b, h, d).permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)

    def mask_for_heads(self, mask: Tensor, has_rows: bool) -> Tensor:
        """Swap positions for heads in a mask, [B, H or 1, t, T] -> [B, H / team or 1, T_team, T].

        Collective over the group if `has_rows`. Otherwise the mask is [B, H or 1, 1, T], and nothing is sent.
        """
        if not has_rows:
            place = self.members.index(self.group.rank())
            return mask if mask.shape[1] == 1 else mask.chunk(len(self.members), 1)[place]
        if mask.shape[1] == 1:
            mask = mask.expand(-1, len(self.members), -1, -1)
        (swapped,) = self.seq_to_heads([mask.view(torch.uint8) if mask.dtype == torch.bool else mask])
        return swapped.view(torch.bool) if mask.dtype == torch.bool else swapped

    @cached_property
    def _lengths(self) -> list[int]:
        return [length_of(runs) for runs in self.runs]

    @cached_property
    def _order(self) -> Tensor:
        """For each position of the team, ascending, the index of its row in what `all_to_all` returns."""
        return torch.cat([indices(runs) for runs in self.runs]).argsort()

    def _of_members(self, counts: Sequence[int]) -> list[int]:
        """Return the row count of each rank of the group, given those of the members: 0 for ranks of other teams."""
        by_rank = dict(zip(self.members, counts, strict=True))
        return [by_rank.get(rank, 0) for rank in range(self.group.size())]
