"""Ulysses: ranks swap positions for heads, and each computes attention of some heads over the positions of all.

One message from each rank to each other one carries queries, keys and values, another one the output. Keys and values
that have fewer heads than there are ranks are sent to all that need them.

Source: S. A. Jacobs et al., DeepSpeed Ulysses, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.collectives.circle import Circle
from lightning_parallel.collectives.spans import Runs, Span
from lightning_parallel.techniques.context_parallel.attention.messages import (
    cut,
    length_of,
    packed,
    put,
    room,
    unpacked,
    with_length,
)

Heads = tuple[Span, ...]
"""Which heads each member gets."""


def heads_of(count: int, members: int) -> Heads:
    """The heads that each member gets; where there are fewer than members, several get the same one."""
    if count % members == 0:
        each = count // members
        return tuple((place * each, (place + 1) * each) for place in range(members))
    assert members % count == 0, "checked before"
    return tuple((place * count // members, place * count // members + 1) for place in range(members))


def heads_fit(heads: int, key_heads: int, members: int) -> bool:
    """Whether members can swap positions for so many heads."""
    return heads % members == 0 and (key_heads % members == 0 or members % key_heads == 0)


@dataclass(frozen=True)
class Team:
    """Ranks that swap positions for heads.

    Args:
        circle: the ranks.
        runs: the positions that each of them has.
    """

    circle: Circle
    runs: tuple[Runs, ...]

    @cached_property
    def union(self) -> Runs:
        """The positions that they have together, ascending."""
        return tuple(sorted(run for runs in self.runs for run in runs))

    @cached_property
    def places(self) -> tuple[Runs, ...]:
        """Where each member's positions lie among those of all."""
        starts, first = {}, 0
        for start, stop in self.union:
            starts[start] = first
            first += stop - start
        return tuple(tuple((starts[start], starts[start] + stop - start) for start, stop in runs) for runs in self.runs)

    @property
    def lengths(self) -> list[int]:
        """How many positions each member has."""
        return [length_of(runs) for runs in self.runs]

    def spread(self, tensors: Sequence[Tensor], heads: Sequence[Heads]) -> list[Tensor]:
        """Of tensors (B, H, own, D) this member's heads at the positions of all, (B, its heads, together, D).

        Args:
            tensors: of one dtype.
            heads: of each of them, which heads each member gets.
        """
        circle, place, lengths = self.circle, self.circle.place, self.lengths
        mine = [tensor[:, slice(*each[place])] for tensor, each in zip(tensors, heads, strict=True)]
        sent = {
            other: packed([tensor[:, slice(*each[other])] for tensor, each in zip(tensors, heads, strict=True)])
            for other in self._others
        }
        received = {other: room(mine[0], with_length(mine, lengths[other])) for other in self._others}
        under_way = circle.exchange(sent, received)
        made = [tensor.new_empty(*tensor.shape[:2], sum(lengths), tensor.shape[3]) for tensor in mine]
        for tensor, part in zip(made, mine, strict=True):
            put(tensor, self.places[place], part)
        under_way.wait()
        for other, message in received.items():
            for tensor, part in zip(made, unpacked(message, with_length(mine, lengths[other])), strict=True):
                put(tensor, self.places[other], part)
        return made

    def collect(self, tensors: Sequence[Tensor], heads: Sequence[Heads]) -> list[Tensor]:
        """The opposite: this member's positions with all heads; what several members have of a head is added up."""
        circle, place, lengths = self.circle, self.circle.place, self.lengths
        sent = {other: packed([cut(tensor, self.places[other]) for tensor in tensors]) for other in self._others}
        own = lengths[place]
        shapes = {
            other: [
                (tensor.shape[0], each[other][1] - each[other][0], own, tensor.shape[3])
                for tensor, each in zip(tensors, heads, strict=True)
            ]
            for other in self._others
        }
        received = {other: room(tensors[0], shapes[other]) for other in self._others}
        under_way = circle.exchange(sent, received)
        made = []
        for tensor, each in zip(tensors, heads, strict=True):
            made.append(tensor.new_zeros(tensor.shape[0], max(stop for _, stop in each), own, tensor.shape[3]))
            made[-1][:, slice(*each[place])] = cut(tensor, self.places[place])
        under_way.wait()
        for other, message in received.items():
            for tensor, each, part in zip(made, heads, unpacked(message, shapes[other]), strict=True):
                tensor[:, slice(*each[other])] += part
        return made

    @property
    def _others(self) -> list[int]:
        return [place for place in range(len(self.circle)) if place != self.circle.place]


def to_heads(query: Tensor, key: Tensor, value: Tensor, team: Team) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of this member's heads at the positions of all members. ⇄ `to_positions`."""
    tensors = query, key, value
    query, key, value = spread(tensors, [heads_of(tensor.shape[1], len(team.circle)) for tensor in tensors], team)
    return query, key, value


def to_positions(out: Tensor, team: Team) -> Tensor:
    """The output of all heads at this member's positions. ⇄ `to_heads`."""
    (found,) = collected([out], [heads_of(out.shape[1] * len(team.circle), len(team.circle))], team)
    return found


def spread(tensors: Sequence[Tensor], heads: Sequence[Heads], team: Team) -> tuple[Tensor, ...]:
    """See `Team.spread`, with gradients. ⇄ `collected`."""
    function: Any = _Spread
    found: tuple[Tensor, ...] = function.apply(team, heads, *tensors)
    return found


def collected(tensors: Sequence[Tensor], heads: Sequence[Heads], team: Team) -> tuple[Tensor, ...]:
    """See `Team.collect`, with gradients. ⇄ `spread`."""
    function: Any = _Collect
    found: tuple[Tensor, ...] = function.apply(team, heads, *tensors)
    return found


def rows_of_all(mask: Tensor, team: Team) -> Tensor:
    """The rows of a mask for the positions of all members; of a mask with heads, those of this member.

    Args:
        mask: this member's rows with all columns, (..., own, T).
        team: the members.
    """
    given = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    shaped = given[(None,) * (4 - given.dim())] if given.dim() < 4 else given
    count = shaped.shape[1]
    heads = own_heads(count, team)
    (found,) = team.spread([shaped.contiguous()], [heads])
    found = found.view(torch.bool) if mask.dtype == torch.bool else found
    return found.view(*found.shape[4 - mask.dim() :])


def own_heads(count: int, team: Team) -> Heads:
    """The heads of a mask that each member needs."""
    members = len(team.circle)
    return ((0, 1),) * members if count == 1 else heads_of(count, members)


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, team: Team, heads: Sequence[Heads], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.team, ctx.heads = team, heads
        return tuple(team.spread(tensors, heads))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        again = torch.is_grad_enabled()
        made = collected(gradients, ctx.heads, ctx.team) if again else ctx.team.collect(gradients, ctx.heads)
        return None, None, *made


class _Collect(Function):
    @staticmethod
    def forward(ctx: Any, team: Team, heads: Sequence[Heads], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.team, ctx.heads = team, heads
        return tuple(team.collect(tensors, heads))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        again = torch.is_grad_enabled()
        made = spread(gradients, ctx.heads, ctx.team) if again else ctx.team.spread(gradients, ctx.heads)
        return None, None, *made
