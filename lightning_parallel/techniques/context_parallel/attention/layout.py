"""Ranks on a grid: teams of neighbours swap positions for heads, and those at the same place in their teams are a ring.

6 ranks in teams of 2: ranks 0-1, 2-3 and 4-5 are teams; 0, 2, 4 and 1, 3, 5 are rings. In teams of 1 all ranks are one
ring; in a team of 6 nothing goes round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_parallel.collectives.circle import Circle
from lightning_parallel.collectives.elements import Elements
from lightning_parallel.collectives.spans import Runs
from lightning_parallel.techniques.context_parallel.attention.blocks import Block, Table, block_of
from lightning_parallel.techniques.context_parallel.attention.masks import tile_of, tiled
from lightning_parallel.techniques.context_parallel.attention.ring import Rounds
from lightning_parallel.techniques.context_parallel.attention.ulysses import Team


@dataclass(frozen=True)
class Layout:
    """The grid, seen by one rank.

    Args:
        team: in which this rank swaps positions for heads.
        circle: in which keys and values of its heads go round.
        runs: the positions of each team, which are those of the members of the ring.
    """

    team: Team
    circle: Circle
    runs: tuple[Runs, ...]

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.team.circle) * len(self.circle)

    @cached_property
    def all_runs(self) -> tuple[Runs, ...]:
        """The positions that each rank has after the swap."""
        return tuple(runs for runs in self.runs for _ in self.team.circle.members)

    def tiled(self) -> Layout:
        """The same with runs in pieces, for masks."""
        longest = tile_of(self.runs)
        return replace(self, runs=tuple(tiled(runs, longest) for runs in self.runs))

    def rounds(self, relations: Callable[[Runs, Runs], Table]) -> Rounds:
        """What this rank does in the ring.

        Args:
            relations: of queries' positions to keys'.
        """
        return self._rounds(lambda one, other: relations(self.runs[one], self.runs[other]))

    def rounds_of(self, tables: Sequence[Table]) -> Rounds:
        """The same for a mask.

        Args:
            tables: of each rank, the relations of its queries to the runs of all members of its ring.
        """
        starts = [sum(map(len, self.runs[:place])) for place in range(len(self.runs) + 1)]
        mine = [tables[rank] for rank in self.circle.members]
        return self._rounds(lambda one, other: [row[starts[other] : starts[other + 1]] for row in mine[one]])

    def _rounds(self, relations: Callable[[int, int], Table]) -> Rounds:
        def block(one: int, other: int) -> Block:
            return block_of(self.runs[one], self.runs[other], relations(one, other))

        circle, steps = self.circle, range(len(self.circle))
        come = tuple(block(circle.place, circle.at(-step)) for step in steps)
        return Rounds(circle, come, tuple(block(circle.at(step), circle.place).spans for step in steps))


def layout_of(elements: Elements, team: int) -> Layout:
    """The grid of the ranks that divide a sequence.

    Args:
        elements: the positions that each rank has.
        team: how many ranks swap positions for heads.
    """
    ranks = elements.ranks
    first = ranks.rank - ranks.rank % team
    teams = [elements.runs[start : start + team] for start in range(0, ranks.count, team)]
    mine = Team(Circle(ranks.group, tuple(range(first, first + team))), elements.runs[first : first + team])
    circle = Circle(ranks.group, tuple(range(ranks.rank % team, ranks.count, team)))
    return Layout(mine, circle, tuple(_joined(runs) for runs in teams))


def _joined(runs: Sequence[Runs]) -> Runs:
    """The positions of several ranks, ascending, in as few spans as can be."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(run for each in runs for run in each):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)
