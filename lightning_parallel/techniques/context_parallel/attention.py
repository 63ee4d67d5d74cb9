"""Attention over a sequence that is sharded over ranks: the choice of a method, and what each method calls.

    ring         keys and values travel around a ring of ranks: `RingAttention`
    ulysses      swap positions for heads, torch's attention, swap back: `UlyssesTeam`
    hybrid       Ulysses within teams of `ulysses_size` ranks, a ring between teams
    all_gather   gather the keys and values of all ranks, then torch's attention
    auto         Ulysses if the heads divide and the mask does not differ between queries; else a ring

`blocks` finds which queries attend to which keys under a mask; `kernels` computes.
In shapes, t is the number of positions of this rank, T that of all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_parallel.collectives.conjugate_collectives import gathered
from lightning_parallel.collectives.elements import Elements
from lightning_parallel.collectives.functional import all_gather_stacked
from lightning_parallel.collectives.spans import Runs, joined
from lightning_parallel.techniques.context_parallel.blocks import Relation, Table, causal_table, encode_table, tiled
from lightning_parallel.techniques.context_parallel.ring import RingAttention, RingSchedule
from lightning_parallel.techniques.context_parallel.ulysses import UlyssesTeam, heads_fit
from lightning_parallel.techniques.divided.rules.attention import Inputs

MANY_RUNS = 16
"""Above this many runs per rank, keys are gathered: rectangles of scores would be too small for a kernel call each."""


class Grid(NamedTuple):
    """Ulysses teams of neighbouring ranks, and rings of the ranks with the same index in their teams.

    6 ranks in teams of 2: ranks 0-1, 2-3 and 4-5 are teams; 0, 2, 4 and 1, 3, 5 are rings. With teams of 1 all ranks
    are one ring; with a team of 6 there is no ring.
    """

    team: tuple[int, ...]
    ring: tuple[int, ...]
    runs: tuple[Runs, ...]
    """Positions of each team, which its member of the ring has after the swap."""
    place: int
    """Index of this rank in its ring, which is the index of its team."""


@dataclass(frozen=True)
class ContextAttention:
    """Attention over a sequence that is sharded over ranks.

    Args:
        method: see `ContextParallel`.
        ulysses_size: number of ranks in a team, for "hybrid".

    Raises:
        ValueError: (when called) numbers of heads that the method cannot divide.
    """

    method: str = "auto"
    ulysses_size: int | None = None

    def __call__(self, inputs: Inputs) -> Any:
        """Return this rank's rows of `scaled_dot_product_attention` over the keys of all ranks.

        Collective over `elements.ranks`. NotImplemented if dtypes differ.
        """
        lead, mask, made = inputs.query.shape[:-2], inputs.mask, inputs.made
        query, key, value = map(as_autocast, inputs[:3])
        if not query.dtype == key.dtype == value.dtype:
            return NotImplemented
        if not math.prod(lead):  # other ranks have all the heads; backward must still reach the three tensors here
            return query @ query.new_zeros(query.shape[-1], value.shape[-1]) + key.sum() + value.sum()
        if mask is not None:
            name = "autocast", torch.is_autocast_enabled(mask.device.type), query.dtype
            mask = as_autocast(mask) if mask.requires_grad else made.get(name, as_autocast, mask)
            if mask.dim() <= 4:
                mask = mask[(None,) * (4 - mask.dim())]
            else:  # [*lead, t, T] -> [B, H or 1, t, T]
                is_broadcast = all(size == 1 for size in mask.shape[:-3])
                batch = (mask if is_broadcast else query).shape[:-3]
                mask = mask.expand(*batch, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
        query, key, value = (each.reshape(math.prod(each.shape[:-3]), *each.shape[-3:]) for each in (query, key, value))
        inputs = inputs._replace(query=query, key=key, value=value, mask=mask)  # with four dimensions
        return self._attend(inputs).reshape(*lead, inputs.elements.length, value.shape[-1])

    def team_size(self, heads: int, key_heads: int, ranks: int, has_rows: bool = False) -> int:
        """Return how many ranks swap positions for heads, the same on all ranks; 1 for a ring without teams.

        Raises:
            ValueError: numbers of heads that the method cannot divide.
        """
        if self.method == "auto":
            return ranks if heads_fit(heads, key_heads, ranks) and not has_rows else 1
        size = {"ulysses": ranks, "hybrid": self.ulysses_size}.get(self.method) or 1
        if heads_fit(heads, key_heads, size):
            return size
        fit = [str(number) for number in range(1, heads + 1) if heads_fit(heads, key_heads, number)]
        names = " or ".join([", ".join(fit[:-1]), fit[-1]] if len(fit) > 1 else fit)
        remedy = f"use {names} ranks" if self.method == "ulysses" else f"give ulysses_size={names}"
        raise ValueError(
            f"method={self.method!r} divides heads over {size} ranks, but attention has {heads} query heads and "
            f"{key_heads} key/value heads; {remedy}, or method='ring'"
        )

    def _attend(self, inputs: Inputs) -> Tensor:
        query, key, value, elements, mask, made, has_rows, is_causal, scale, dropout = inputs
        ranks, has_rows = elements.ranks, mask is not None and has_rows
        size = self.team_size(query.shape[1], key.shape[1], ranks.count, has_rows)
        learns = mask is not None and mask.requires_grad and torch.is_grad_enabled()
        if self.method == "all_gather" or learns:  # a ring computes no gradient of the mask
            return attend_gathered(inputs)
        grid = grid_of(elements.runs, ranks.rank, size)
        if size < ranks.count and any(len(runs) > MANY_RUNS for runs in grid.runs):
            return attend_gathered(inputs)
        team = UlyssesTeam(ranks.group, grid.team, elements.runs[grid.team[0] : grid.team[-1] + 1])
        if size > 1:
            # Fewer heads of keys than ranks: repeat each for all ranks whose queries need it.
            times = max(1, size // key.shape[1])
            key, value = (each.repeat_interleave(times, 1) if times > 1 else each for each in (key, value))
            query, key, value = team.seq_to_heads((query, key, value))
            if (rows := mask) is not None:
                name = "rows", has_rows, rows.dtype, rows.shape, team.runs
                mask = made.get(name, team.mask_for_heads, rows, has_rows)
        if size == ranks.count:
            grouped = query.shape[1] != key.shape[1]
            out = F.scaled_dot_product_attention(
                query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=grouped
            )
            return team.heads_to_seq(out)
        schedule: RingSchedule | None
        if (all_rows := mask) is None:
            schedule = schedule_of(grid, is_causal)
        else:
            schedule = made.get(("schedule", all_rows.dtype, grid), schedule_by_mask, all_rows, grid, elements)
        if schedule is None:
            return attend_gathered(inputs)
        out = RingAttention.apply(query, key, value, mask, schedule, ranks.group, scale, dropout)  # type: ignore[no-untyped-call]
        return team.heads_to_seq(out) if size > 1 else out


@lru_cache(maxsize=1000)
def grid_of(runs: tuple[Runs, ...], rank: int, team_size: int) -> Grid:
    """Return the team and the ring of `rank`, where `runs` are the positions of each rank."""
    first, count = rank - rank % team_size, len(runs)
    teams = [
        sorted(run for each in runs[start : start + team_size] for run in each) for start in range(0, count, team_size)
    ]
    team, ring = tuple(range(first, first + team_size)), tuple(range(rank % team_size, count, team_size))
    return Grid(team, ring, tuple(map(joined, teams)), rank // team_size)


@lru_cache(maxsize=1000)
def schedule_of(grid: Grid, is_causal: bool) -> RingSchedule:
    """Return the ring schedule of this rank without a mask."""

    def table(one: int, other: int) -> Table:
        queries, keys = grid.runs[one], grid.runs[other]
        return causal_table(queries, keys) if is_causal else [[Relation.ALL] * len(keys) for _ in queries]

    return RingSchedule.of(grid.ring, grid.place, grid.runs, table)


def schedule_by_mask(mask: Tensor, grid: Grid, elements: Elements) -> RingSchedule | None:
    """Return the ring schedule of this rank with a mask, of which each rank analyzes its rows.

    Collective over all ranks that shard the sequence. None if all biases of some row are huge negative numbers: softmax
    then depends on how sums are rounded.

    Args:
        mask: this rank's rows with all columns, [B, H, t, T]; broadcast dimensions have size 1.
        grid: the team and the ring of this rank.
        elements: positions of each rank.
    """
    ranks, tiles = elements.ranks, tiled(grid.runs)
    tiles_by_rank = [tiles[rank // len(grid.team)] for rank in range(ranks.count)]
    keys = [tile for runs in tiles for tile in runs]
    codes_here = encode_table(mask, tiles_by_rank[ranks.rank], keys)
    message = codes_here.new_zeros(max(map(len, tiles_by_rank)) * len(keys) + 1)
    message[: len(codes_here)] = codes_here
    tables = list[Table]()  # for each rank, the relations of its queries to all keys
    for (is_degenerate, *codes), rows in zip(
        all_gather_stacked(message, ranks.group).tolist(), tiles_by_rank, strict=True
    ):
        if is_degenerate:
            return None
        columns = len(keys)
        tables.append([[Relation(code) for code in codes[n * columns : (n + 1) * columns]] for n in range(len(rows))])
    starts = [sum(map(len, tiles[:place])) for place in range(len(tiles) + 1)]

    def table(one: int, other: int) -> Table:
        return [row[starts[other] : starts[other + 1]] for row in tables[grid.ring[one]]]

    return RingSchedule.of(grid.ring, grid.place, tiles, table)


def attend_gathered(inputs: Inputs) -> Tensor:
    """Attend to the keys and values of all ranks: one all-gather in forward, another in backward to save memory."""
    _, _, _, elements, mask, _, _, is_causal, scale, dropout = inputs
    if is_causal:
        positions = elements.numbers("index", inputs.query.device)
        mask = positions[:, None] >= torch.arange(elements.size, device=positions.device)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        both = gathered(torch.cat([key, value], -1), 2, elements)
        keys, values = torch.split(both, [key.shape[-1], value.shape[-1]], -1)
        if not query.shape[2]:  # zero is a tensor, saved for backward, so that recomputation gathers on this rank too
            zero = query.new_zeros(())
            return query @ query.new_zeros(query.shape[-1], value.shape[-1]) + (keys.sum() + values.sum()) * zero
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, keys, values, mask, dropout, scale=scale, enable_gqa=grouped)

    tensors = *inputs[:3], mask
    if not any(each is not None and each.requires_grad for each in tensors):
        return attend(*tensors)
    out: Tensor = checkpoint(attend, *tensors, use_reentrant=False, preserve_rng_state=dropout > 0)
    return out


def as_autocast(tensor: Tensor) -> Tensor:
    """Cast a tensor as torch's attention does under autocast."""
    kind = tensor.device.type
    if tensor.is_floating_point() and tensor.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor
