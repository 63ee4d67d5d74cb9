"""Random numbers for a rank's own elements: different ones on ranks that have different elements.

Draws start from the state of the generator that all ranks have alike, and from the elements that the rank has, so that
a recomputation, which starts from the same state, draws the same ones again. The generator moves on alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from lightning_parallel.collectives.elements import Elements

_STEP = 4
"""By how much a GPU's generator moves on: its offset counts in fours."""


@contextmanager
def drawn_apart(device: torch.device, cuts: Iterable[Elements]) -> Iterator[None]:
    """Inside, the device's generator draws for this rank alone.

    Args:
        device: where is drawn.
        cuts: of what is drawn for; ranks that have copies of the same elements draw the same.
    """
    generator = _generator(device)
    seed = _next_seed(generator, device)
    after = generator.get_state()
    for elements in cuts:
        seed = hash((seed, elements.size, elements.own))
    generator.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        generator.set_state(after)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _next_seed(generator: torch.Generator, device: torch.device) -> int:
    """A number that all ranks have alike, and another one next time; a GPU need not be waited for."""
    if device.type != "cuda":
        return int(torch.randint(2**62, (), generator=generator).item())
    offset = generator.get_offset()
    generator.set_offset(offset + _STEP)
    return hash((generator.initial_seed(), offset))
