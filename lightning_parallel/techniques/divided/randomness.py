"""Random numbers for local shards: ranks with different elements draw different numbers.

The seed combines the state of the generator, the same on all ranks, with the indices of the local elements. So a
recomputation, which starts from the same state, draws the same numbers, and generators stay the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from lightning_parallel.techniques.divided.table import Cuts


@contextmanager
def rng_for_elements(device: torch.device, places: Sequence[int]) -> Iterator[None]:
    """Return a context in which the device's generator draws numbers for this rank's elements.

    Args:
        device: the device that draws.
        places: the elements to draw for, as numbers from `indices_key`; ranks with other elements draw other numbers.
    """
    # The seed is the same on all ranks and differs at each call; a GPU computes it without a synchronization.
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        offset = generator.get_offset()
        generator.set_offset(offset + 4)  # torch requires offsets to be multiples of 4
        seed = hash((generator.initial_seed(), offset))
    else:
        generator = torch.default_generator
        seed = int(torch.randint(2**62, (), generator=generator).item())
    after = generator.get_state()
    generator.manual_seed(hash((seed, *places)) % 2**63)
    try:
        yield
    finally:
        generator.set_state(after)


def indices_key(cuts: Cuts) -> list[int]:
    """Return numbers that are equal on two ranks exactly if they have the same elements."""
    spans = [(elements.size, len(elements.own), *chain(*elements.own)) for elements in cuts.values()]
    return list(chain(*spans))


@torch.library.custom_op(
    "lightning_parallel::kept_in_dropout", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def kept_in_dropout(own: Tensor, p: float, places: Sequence[int], number: int) -> Tensor:
    """Draw the mask of elements that dropout keeps, as an operation of a graph, which cannot set a generator's state.

    Args:
        own: the local shard.
        p: the probability to drop an element.
        places: the elements of the shard, as numbers from `indices_key`.
        number: index of this draw in the graph: compilers merge equal calls, except those of operations of torch's own
            that they know by name to be random.
    """
    with rng_for_elements(own.device, places):
        return torch.empty_like(own).bernoulli_(1 - p).bool()


@kept_in_dropout.register_fake
def _kept_in_dropout(own: Tensor, p: float, places: Sequence[int], number: int) -> Tensor:
    return torch.empty_like(own, dtype=torch.bool)
