"""Random programs on divided tensors give the values and gradients of one device."""

from __future__ import annotations

import random
from typing import Any

import torch.distributed as dist

from lightning_parallel.collectives.elements import Ranks
from tests.ranks import run_on_ranks
from tests.techniques.divided.operations import DIVISIONS
from tests.techniques.divided.random_programs import Cut, Program, difference, drawn, expected, on_ranks
from tests.tiers import sampled

LENGTH, COUNT = 12, 50
REFUSED = "was changed in place, but a view of its gathered copy exists"
"""What all ranks say of a write that a view of a gathered tensor would not follow."""


def _difference(program: Program, seed: int, division: str | None) -> str:
    """What ranks find otherwise than one device, on any of them."""
    wanted = expected(program, seed)
    if wanted is None:
        return ""
    among = Ranks(dist.group.WORLD, "tp")
    columns = among.chunks(8) if seed % 2 else among.elements(8, [[(0, 2), (6, 8)], [(2, 6)]])
    cuts: list[Cut] = [(dim, make(among)) for dim, make in DIVISIONS[division].items()] if division else [None]
    try:
        mine = difference(wanted, on_ranks(program, seed, cuts[0], columns), 1e-7)
    except Exception as error:
        mine = REFUSED if REFUSED in str(error) else f"{type(error).__name__}: {error}"
    found: list[Any] = [None] * among.count
    dist.all_gather_object(found, mine)
    return "" if set(found) == {REFUSED} else "; ".join(sorted(filter(None, found)))


def failures(first: int) -> list[str]:
    found = []
    for seed in range(first, first + COUNT):
        program = drawn(LENGTH, seed)
        division = random.Random(seed).choice([None, *DIVISIONS])
        if off := _difference(program, seed, division):
            found.append(f"{seed}, {division}: {off}: {program}")
    return found


@sampled(1, "first", range(0, 20 * COUNT, COUNT))
def test_random_programs_give_what_one_device_gives(first: int) -> None:
    for found in run_on_ranks(2, failures, first, limit=120):
        assert not found, "\n".join(found)
