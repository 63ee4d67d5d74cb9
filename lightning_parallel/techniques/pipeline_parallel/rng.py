"""The random numbers that a user's step draws where several ranks run parts of it.

Every stage of a pipeline runs the step's own code, which may draw noise or a mask before the blocks and use it again
after them. So this code draws the same on all stages, and blocks, of which each stage has others, draw apart.

| what runs | its draws continue |
|---|---|
| the first microbatch | where the generators stood when the batch began, alike on all ranks |
| another microbatch | from a seed made of that state, of the batch and of the microbatch |
| a block, or a module outside of blocks | from a seed of its place too; after it, they stand where they did |
| what follows the batch | where the first microbatch left them on the last stage |
"""

from __future__ import annotations

import pickle
import random
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_parallel.techniques.tools.telling import log


class GeneratorStates(NamedTuple):
    """Where generators stand: torch's, in their order, Python's and NumPy's."""

    torch: list[Tensor]
    python: Any
    numpy: Any


def own_generators(model: nn.Module) -> list[torch.Generator]:
    """The generators that modules keep."""
    kept = (each for module in model.modules() for each in vars(module).values())
    return list(dict.fromkeys(each for each in kept if isinstance(each, torch.Generator)))


class StageRNG:
    """The generators from which the steps of one model draw, those that its modules keep among them."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        on_device = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
        self._generators = [torch.default_generator, *on_device, *own_generators(model)]
        self._base, self._seeds = 0, [0] * len(self._generators)
        self._microbatch, self._runs, self._batch = 0, 0, 0
        self._told = False
        self.alike = False  # whether all microbatches draw what the first one draws, as while a loss is measured
        self._first = self._now()
        # where the first microbatch left the generators on the last stage; None where it drew nothing
        self.left: GeneratorStates | None = None

    def _now(self) -> GeneratorStates:
        return GeneratorStates(
            [each.get_state() for each in self._generators], random.getstate(), np.random.get_state()
        )

    def _restore(self, state: GeneratorStates) -> None:
        self.come_back((state.torch, state.python))
        np.random.set_state(state.numpy)

    def begin(self, batch: int) -> None:
        """Before a batch; `batch` is how many batches of training came before."""
        self._runs = self._runs + 1 if batch == self._batch else 0  # as the batches of an evaluation
        self._batch, self._first, self.left = batch, self._now(), None
        self._base = hash((zlib.crc32(self._first.torch[0].numpy().tobytes()), batch, self._runs))
        self._seeds = [each.initial_seed() for each in self._generators]

    def begin_microbatch(self, microbatch: int) -> None:
        """Set the generators for a stage's run of a microbatch."""
        self._microbatch = microbatch = 0 if self.alike else microbatch
        if microbatch == 0:
            self._restore(self._first)
            return
        self.depart(-1)
        np.random.seed(hash((self._base, microbatch)) % 2**32)

    def end_microbatch(self) -> None:
        """Note where the first microbatch left the generators, after the last stage ran it."""
        if self._microbatch == 0:
            now, first = self._now(), self._first
            alike = all(map(torch.equal, now.torch, first.torch))
            drawn = not alike or pickle.dumps((now.python, now.numpy)) != pickle.dumps((first.python, first.numpy))
            self.left = now if drawn else None

    def depart(self, place: int) -> tuple[list[Tensor], Any]:
        """Before a block or another module, by a number of its own; returns where generators stand, for `come_back`.

        NumPy's generator, which takes longer than these, stays as it is.
        """
        before = [*map(torch.Generator.get_state, self._generators)], random.getstate()
        for number, (generator, seed) in enumerate(zip(self._generators, self._seeds, strict=True)):
            generator.manual_seed(hash((self._base, self._microbatch, place, number, seed)) % 2**63)
        random.seed(hash((self._base, self._microbatch, place)))
        return before

    def come_back(self, before: tuple[list[Tensor], Any]) -> None:
        """Put the generators back to where they stood before `depart`."""
        for generator, state in zip(self._generators, before[0], strict=True):
            generator.set_state(state)
        random.setstate(before[1])

    def tell_of_whole(self) -> None:
        """Warn once of draws that differ: the last stage ran the step for the whole batch, others for microbatches."""
        if self.left is not None and not self._told:
            self._told = True
            log.warning(
                "The step draws random numbers outside of its blocks, and with loss_over='batch' the last stage draws "
                "them for the whole batch, the others for each microbatch: what is drawn before the blocks and used "
                "again after them differs. Draw it in the dataset or its collate_fn, or use microbatches=1"
            )

    def end(self, left: GeneratorStates | None) -> None:
        """After a batch: generators stand where they were left on the last stage."""
        self._restore(left or self._first)
