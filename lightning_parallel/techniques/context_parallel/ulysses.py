"""Ulysses: ranks swap positions for heads, and each computes attention of some heads over all positions.

Example: 2 ranks, 4 heads, 8 positions. Before the swap a rank has all heads of 4 positions, [B, 4, 4, D]; after it
2 heads of all positions, [B, 2, 8, D]. Queries, keys and values travel in one all_to_all, the output in another one.
Keys and values with fewer heads than ranks are repeated first, so that each rank gets the head that its queries meet.

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
        group: the process group.
        members: its ranks in the team, ascending.
        runs: positions of each member.
    """

    group: dist.ProcessGroup
    members: tuple[int, ...]
    runs: tuple[Runs, ...]

    def seq_to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """[B, H, own, D] -> [B, H / team, together, D] of each tensor, positions ascending. Differentiable.

        Collective over the members, one message for all tensors. Tensors have one dtype; their heads divide.
        """
        size, own = len(self.members), tensors[0].shape[2]
        split = [torch.unflatten(each, 1, (size, -1)) for each in tensors]  # [B, team, h, own, D]
        rows = torch.cat([each.permute(1, 3, 0, 2, 4).flatten(2) for each in split], -1)  # [team, own, sum of B h D]
        arrived = all_to_all(
            rows.flatten(0, 1), self._of_members([own] * size), self._of_members(self._lengths), self.group
        )
        arrived = arrived.index_select(0, self._order.to(rows.device))  # [together, sum of B h D]
        shapes = [(each.shape[0], each.shape[2], each.shape[4]) for each in split]
        parts = torch.split(arrived, [*map(prod, shapes)], -1)
        return [torch.unflatten(part, 1, shape).permute(1, 2, 0, 3) for part, shape in zip(parts, shapes, strict=True)]

    def heads_to_seq(self, out: Tensor) -> Tensor:
        """[B, H / team, together, D] -> [B, H, own, D]. Differentiable; collective over the members."""
        b, h, _, d = out.shape
        size, own = len(self.members), self._lengths[self.members.index(self.group.rank())]
        rows = out.permute(2, 0, 1, 3).flatten(1).index_select(0, self._order.argsort().to(out.device))
        arrived = all_to_all(rows, self._of_members(self._lengths), self._of_members([own] * size), self.group)
        # Heads beside each other in memory, as torch's attention returns them: models join them next, without a copy.
        return arrived.view(size, own, b, h, d).permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)

    def mask_for_heads(self, mask: Tensor, has_rows: bool) -> Tensor:
        """The mask after the swap, [B, H / team or 1, together, T], of this rank's rows, [B, H or 1, own, T].

        Without rows of their own for positions, [B, H or 1, 1, T], nothing is sent.
        """
        if not has_rows:
            place = self.members.index(self.group.rank())
            return mask if mask.shape[1] == 1 else mask.chunk(len(self.members), 1)[place]
        if mask.shape[1] == 1:
            mask = mask.expand(-1, len(self.members), -1, -1)
        (found,) = self.seq_to_heads([mask.view(torch.uint8) if mask.dtype == torch.bool else mask])
        return found.view(torch.bool) if mask.dtype == torch.bool else found

    @cached_property
    def _lengths(self) -> list[int]:
        return [length_of(runs) for runs in self.runs]

    @cached_property
    def _order(self) -> Tensor:
        """For each position, ascending, its row among those that arrive by member."""
        return torch.cat([indices(runs) for runs in self.runs]).argsort()

    def _of_members(self, counts: Sequence[int]) -> list[int]:
        """Counts of rows for each rank of the group: none of ranks outside the team."""
        found = dict(zip(self.members, counts, strict=True))
        return [found.get(rank, 0) for rank in range(self.group.size())]
