"""Random numbers for a rank's own elements: different ones on ranks that have different elements.

Draws start from the state of the generator that all ranks have alike, and from the elements that the rank has, so that
a recomputation, which starts from the same state, draws the same ones again. The generator moves on alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from lightning_parallel.techniques.divided.table import Cuts


@contextmanager
def drawn_apart(device: torch.device, places: Sequence[int]) -> Iterator[None]:
    """Inside, the device's generator draws for this rank alone.

    Args:
        device: where is drawn.
        places: what `places_of` says of what is drawn for; ranks that have other elements draw others.
    """
    # A seed that all ranks have alike, and another one next time; a GPU need not be waited for.
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        offset = generator.get_offset()
        generator.set_offset(offset + 4)  # offsets count in fours
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


def places_of(cuts: Cuts) -> list[int]:
    """Numbers that are alike where ranks have the same elements, and there alone."""
    spans = [(elements.size, len(elements.own), *chain(*elements.own)) for elements in cuts.values()]
    return list(chain(*spans))


@torch.library.custom_op(
    "lightning_parallel::kept_in_dropout", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def kept_in_dropout(own: Tensor, p: float, places: Sequence[int], number: int) -> Tensor:
    """Which of a rank's own elements dropout keeps, in a graph, which has no way to set a generator's state.

    Args:
        own: the elements.
        p: the probability with which one is dropped.
        places: what `places_of` says of them.
        number: of this draw among those of the graph: compilers take equal calls for one, and know by name alone which
            of torch's own draw.
    """
    with drawn_apart(own.device, places):
        return torch.empty_like(own).bernoulli_(1 - p).bool()


@kept_in_dropout.register_fake
def _kept_in_dropout(own: Tensor, p: float, places: Sequence[int], number: int) -> Tensor:
    return torch.empty_like(own, dtype=torch.bool)
