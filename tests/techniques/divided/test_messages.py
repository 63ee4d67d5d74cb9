"""Ranks send the same messages in the same order, whichever elements they have: no process waits for another one here.

One process takes the place of each rank in turn, in a group that sends nothing. What is received is not what others
would have sent, so programs of which values decide the course are left out.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_parallel.collectives.elements import Elements, Ranks
from tests.techniques.divided.random_programs import Program, drawn, on_ranks
from tests.tiers import sampled

DECIDED_BY_VALUES = {
    *("decided", "a number", "masked", "places", "histogram", "one hot", "set by mask", "embedding", "rows")
}
"""The names of operations whose results have shapes that depend on values, or that raise for some values."""
COUNT = 8


class Recorded(TorchDispatchMode):
    """Notes the collectives that run, and how many elements each of their tensors has."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [leaf.numel() for leaf in tree_leaves(args) if hasattr(leaf, "numel")]
            self.messages.append(f"{func.overloadpacket} {sizes}")
        return func(*args, **(kwargs or {}))


def uneven(size: int, among: Ranks, draw: random.Random) -> Elements:
    """Elements in one span for each rank; some ranks have few of them, or none."""
    ends = [0, *sorted(draw.choices(range(size + 1), k=among.count - 1)), size]
    return among.elements(size, [[(start, end)] if start < end else [] for start, end in itertools.pairwise(ends)])


def messages(program: Program, seed: int, count: int, rank: int) -> list[str]:
    """What a rank sends in a program and its backward pass; the error that it raises comes last."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=count)
    try:
        among, draw = Ranks(dist.group.WORLD, "tp"), random.Random(seed)
        dim = draw.randrange(4)
        cut = dim, uneven((2, 6, 4, 8)[dim], among, draw)
        with Recorded() as recorded:
            try:
                on_ranks(program, seed, cut, uneven(8, among, draw))
            except Exception as error:
                recorded.messages.append(type(error).__name__)
        return recorded.messages
    finally:
        dist.destroy_process_group()


@sampled(1, "first", range(0, 10 * COUNT, COUNT))
def test_ranks_send_the_same_messages(first: int) -> None:
    for seed in range(first, first + COUNT):
        program = [step for step in drawn(10, seed) if step.name not in DECIDED_BY_VALUES]
        if len(program) < 10:  # a later step may use what one that is left out makes
            continue
        for count in (2, 3, 5):
            of_all = [messages(program, seed, count, rank) for rank in range(count)]
            assert all(each == of_all[0] for each in of_all), f"seed {seed}, {count} ranks: {of_all}\n{program}"
