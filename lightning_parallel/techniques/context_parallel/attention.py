"""Attention where ranks have some positions of queries, keys and values: which method, and what each of them calls.

    ring         keys and values go round: `RingAttention`
    ulysses      heads for positions, torch's attention, positions for heads: `UlyssesTeam`
    hybrid       Ulysses within teams of `ulysses_size` ranks, a ring between teams
    all_gather   keys and values of all, and torch's attention
    auto         Ulysses if heads divide and no mask has rows of its own for each query; else a ring

`blocks` says which queries meet which keys, and what masks leave of that; `kernels` computes.
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

from lightning_parallel.collectives.by_elements import gathered
from lightning_parallel.collectives.elements import Elements
from lightning_parallel.collectives.functional import parts_of_all
from lightning_parallel.collectives.made_of import Made
from lightning_parallel.collectives.spans import Runs, joined
from lightning_parallel.techniques.context_parallel.blocks import Relation, Table, causal_table, encode_table, tiled
from lightning_parallel.techniques.context_parallel.ring import RingAttention, RingSchedule
from lightning_parallel.techniques.context_parallel.ulysses import UlyssesTeam, heads_fit

METHODS = ("auto", "ring", "ulysses", "all_gather", "hybrid")

MANY_RUNS = 16
"""Runs of one rank above which rectangles of scores are too small to be worth a kernel call each."""


class Grid(NamedTuple):
    """Ulysses teams of neighbours, and rings of those ranks that have the same place in their teams.

    6 ranks in teams of 2: ranks 0-1, 2-3 and 4-5 are teams; 0, 2, 4 and 1, 3, 5 are rings. In teams of 1 all ranks are
    one ring; in a team of 6 nothing goes round.
    """

    team: tuple[int, ...]
    ring: tuple[int, ...]
    runs: tuple[Runs, ...]
    """Positions of each team: those of the ring's members after the swap."""
    place: int
    """Of this rank in its ring: the number of its team."""


class Inputs(NamedTuple):
    """Arguments of attention, with four dimensions."""

    query: Tensor  # [B, H, own, D]
    key: Tensor  # [B, Hkv, own, D]
    value: Tensor  # [B, Hkv, own, Dv]
    elements: Elements
    mask: Tensor | None  # broadcasts to [B, H, own, T]
    made: Made  # of the mask, by earlier layers
    has_rows: bool  # whether positions differ in the mask
    is_causal: bool
    scale: float | None
    dropout: float


@dataclass(frozen=True)
class ContextAttention:
    """Attention over a sequence that is divided over ranks.

    Args:
        method: one of `METHODS`.
        ulysses_size: ranks of a team, for "hybrid".

    Raises:
        ValueError: (when called) heads that the method cannot divide.
    """

    method: str = "auto"
    ulysses_size: int | None = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        elements: Elements,
        *,
        mask: Tensor | None = None,
        made: Made | None = None,
        has_rows: bool = True,
        is_causal: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> Any:
        """Return this rank's rows of `scaled_dot_product_attention` over the keys of all ranks, or NotImplemented.

        Args:
            query: of this rank's positions, [..., H, own, D].
            key: of these positions, with as many heads or a divisor of them.
            value: the same.
            elements: positions of each rank.
            mask: booleans or summands of scores, this rank's rows of it with all columns; broadcast as torch does.
            made: what was made of the mask before, by other layers.
            has_rows: whether queries differ in the mask: a rank that has one of them cannot see that.
            is_causal: whether queries meet earlier positions and their own only.
            scale: of scores; None for one over the root of D.
            dropout: of weights.
        """
        lead = query.shape[:-2]
        made = Made() if made is None else made
        query, key, value = map(as_autocast, (query, key, value))
        if not query.dtype == key.dtype == value.dtype:
            return NotImplemented
        if not math.prod(lead):  # other ranks have all the heads; backward must reach all three on every rank
            return query @ query.new_zeros(query.shape[-1], value.shape[-1]) + key.sum() + value.sum()
        if mask is not None:
            name = "autocast", torch.is_autocast_enabled(mask.device.type), query.dtype
            mask = as_autocast(mask) if mask.requires_grad else made.get(name, as_autocast, mask)
            if mask.dim() <= 4:
                mask = mask[(None,) * (4 - mask.dim())]
            else:  # [*lead, own, T] -> [B, H or 1, own, T]
                once = all(size == 1 for size in mask.shape[:-3])
                batch = (mask if once else query).shape[:-3]
                mask = mask.expand(*batch, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
        query, key, value = (each.reshape(math.prod(each.shape[:-3]), *each.shape[-3:]) for each in (query, key, value))
        inputs = Inputs(query, key, value, elements, mask, made, has_rows, is_causal, scale, dropout)
        return self._attend(inputs).reshape(*lead, elements.length, value.shape[-1])

    def team_size(self, heads: int, key_heads: int, ranks: int, has_rows: bool = False) -> int:
        """How many ranks swap positions for heads: 1 in a ring. All ranks find the same.

        Raises:
            ValueError: heads that the method cannot divide.
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
            f"method={self.method!r} divides heads over {size} ranks, but attention has {heads} of queries and "
            f"{key_heads} of keys and values; {remedy}, or method='ring'"
        )

    def _attend(self, inputs: Inputs) -> Tensor:
        query, key, value, elements, mask, made, has_rows, is_causal, scale, dropout = inputs
        ranks, has_rows = elements.ranks, mask is not None and has_rows
        size = self.team_size(query.shape[1], key.shape[1], ranks.count, has_rows)
        learns = mask is not None and mask.requires_grad and torch.is_grad_enabled()
        if self.method == "all_gather" or learns:
            return attend_gathered(inputs)
        grid = grid_of(elements.runs, ranks.rank, size)
        if size < ranks.count and any(len(runs) > MANY_RUNS for runs in grid.runs):
            return attend_gathered(inputs)
        team = UlyssesTeam(ranks.group, grid.team, elements.runs[grid.team[0] : grid.team[-1] + 1])
        if size > 1:
            # Of fewer heads than ranks each goes to all ranks that need it.
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
    """The grid of ranks that have these positions, seen by one of them."""
    first, count = rank - rank % team_size, len(runs)
    teams = [
        sorted(run for each in runs[start : start + team_size] for run in each) for start in range(0, count, team_size)
    ]
    team, ring = tuple(range(first, first + team_size)), tuple(range(rank % team_size, count, team_size))
    return Grid(team, ring, tuple(map(joined, teams)), rank // team_size)


@lru_cache(maxsize=1000)
def schedule_of(grid: Grid, is_causal: bool) -> RingSchedule:
    """What a rank does in a ring without a mask."""

    def table(one: int, other: int) -> Table:
        queries, keys = grid.runs[one], grid.runs[other]
        return causal_table(queries, keys) if is_causal else [[Relation.ALL] * len(keys) for _ in queries]

    return RingSchedule.of(grid.ring, grid.place, grid.runs, table)


def schedule_by_mask(mask: Tensor, grid: Grid, elements: Elements) -> RingSchedule | None:
    """What a rank does in a ring, by what all ranks see in their rows of a mask.

    Collective over all ranks that divide the sequence. None where some row's biases are all huge negative numbers: then
    softmax depends on how sums are rounded.

    Args:
        mask: this rank's rows with all columns, [B, H, own, T]; what is broadcast has size 1.
        grid: of all ranks.
        elements: positions of each rank.
    """
    ranks, tiles = elements.ranks, tiled(grid.runs)
    of_ranks = [tiles[rank // len(grid.team)] for rank in range(ranks.count)]
    keys = [tile for runs in tiles for tile in runs]
    own = encode_table(mask, of_ranks[ranks.rank], keys)
    message = own.new_zeros(max(map(len, of_ranks)) * len(keys) + 1)
    message[: len(own)] = own
    tables = list[Table]()  # of each rank: relations of its queries to all keys
    for (drowned, *codes), rows in zip(parts_of_all(message, ranks.group).tolist(), of_ranks, strict=True):
        if drowned:
            return None
        columns = len(keys)
        tables.append([[Relation(code) for code in codes[n * columns : (n + 1) * columns]] for n in range(len(rows))])
    starts = [sum(map(len, tiles[:place])) for place in range(len(tiles) + 1)]

    def table(one: int, other: int) -> Table:
        return [row[starts[other] : starts[other + 1]] for row in tables[grid.ring[one]]]

    return RingSchedule.of(grid.ring, grid.place, tiles, table)


def attend_gathered(inputs: Inputs) -> Tensor:
    """Attention to the keys and values of all, gathered by one collective, and again in backward: none are kept."""
    _, _, _, elements, mask, _, _, is_causal, scale, dropout = inputs
    if is_causal:
        positions = elements.index(inputs.query.device)
        mask = positions[:, None] >= torch.arange(elements.size, device=positions.device)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        both = gathered(torch.cat([key, value], -1), 2, elements)
        keys, values = torch.split(both, [key.shape[-1], value.shape[-1]], -1)
        if not query.shape[2]:  # a tensor, not a number: it is saved, so that backward gathers on this rank, too
            zero = query.new_zeros(())
            return query @ query.new_zeros(query.shape[-1], value.shape[-1]) + (keys.sum() + values.sum()) * zero
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, keys, values, mask, dropout, scale=scale, enable_gqa=grouped)

    given = *inputs[:3], mask
    if not any(each is not None and each.requires_grad for each in given):
        return attend(*given)
    out: Tensor = checkpoint(attend, *given, use_reentrant=False, preserve_rng_state=dropout > 0)
    return out


def as_autocast(tensor: Tensor) -> Tensor:
    """What torch's attention would compute with under autocast."""
    kind = tensor.device.type
    if tensor.is_floating_point() and tensor.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor
