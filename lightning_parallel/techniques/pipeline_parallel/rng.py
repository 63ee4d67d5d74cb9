"""Random number generators of a step that runs on several stages.

Every stage runs the code of the step outside of blocks, which may draw noise or a mask before the blocks and use it
again after them: this code must draw the same numbers on all stages. Each stage runs other blocks, so blocks must not
advance the generators.

| code                                    | state of the generators                                                   |
|-----------------------------------------|---------------------------------------------------------------------------|
| first microbatch                        | the state at the beginning of the batch, the same on all ranks            |
| other microbatches                      | seeded by that state, the batch and the microbatch                        |
| block, or module outside of blocks      | seeded by its number `place`, too; afterwards the state before it returns |
| after the batch                         | the state after the first microbatch on the last stage                    |
"""

from __future__ import annotations

import pickle
import random
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_parallel.techniques.tools.user_warnings import log


class GeneratorStates(NamedTuple):
    """States of torch's generators (in the order of `StageRNG`), of Python's and of NumPy's."""

    torch: list[Tensor]
    python: Any
    numpy: Any


def generators_of_modules(model: nn.Module) -> list[torch.Generator]:
    """Return the `torch.Generator`s that are attributes of modules."""
    attributes = (value for module in model.modules() for value in vars(module).values())
    return list(dict.fromkeys(value for value in attributes if isinstance(value, torch.Generator)))


class StageRNG:
    """The generators that the steps of a model use: the global ones, and attributes of its modules."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        on_device = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
        self._generators = [torch.default_generator, *on_device, *generators_of_modules(model)]
        self._base, self._seeds = 0, [0] * len(self._generators)
        self._microbatch, self._runs, self._batch = 0, 0, 0
        self._told = False
        self.alike = False  # whether all microbatches draw the numbers of the first one, as while a loss is measured
        self._first = self._now()
        # states after the first microbatch on the last stage; None if it drew nothing
        self.left: GeneratorStates | None = None

    def _now(self) -> GeneratorStates:
        return GeneratorStates(
            [generator.get_state() for generator in self._generators], random.getstate(), np.random.get_state()
        )

    def _restore(self, state: GeneratorStates) -> None:
        self.restore_states((state.torch, state.python))
        np.random.set_state(state.numpy)

    def begin(self, batch: int) -> None:
        """Begin a batch; `batch` is the number of training batches before it."""
        self._runs = self._runs + 1 if batch == self._batch else 0  # the batches of an evaluation have the same number
        self._batch, self._first, self.left = batch, self._now(), None
        self._base = hash((zlib.crc32(self._first.torch[0].numpy().tobytes()), batch, self._runs))
        self._seeds = [generator.initial_seed() for generator in self._generators]

    def begin_microbatch(self, microbatch: int) -> None:
        """Set the generators before a stage runs a microbatch."""
        self._microbatch = microbatch = 0 if self.alike else microbatch
        if microbatch == 0:
            self._restore(self._first)
            return
        self.depart(-1)
        np.random.seed(hash((self._base, microbatch)) % 2**32)

    def end_microbatch(self) -> None:
        """Store the states after the first microbatch. Called after the last stage ran a microbatch."""
        if self._microbatch == 0:
            now, first = self._now(), self._first
            unchanged = all(map(torch.equal, now.torch, first.torch))
            drawn = not unchanged or pickle.dumps((now.python, now.numpy)) != pickle.dumps((first.python, first.numpy))
            self.left = now if drawn else None

    def depart(self, place: int) -> tuple[list[Tensor], Any]:
        """Seed the generators for a block or module with the number `place`; return their states for `restore_states`.

        NumPy's generator is left out, because saving its state takes longer than that of all others.
        """
        states = [*map(torch.Generator.get_state, self._generators)], random.getstate()
        for index, (generator, seed) in enumerate(zip(self._generators, self._seeds, strict=True)):
            generator.manual_seed(hash((self._base, self._microbatch, place, index, seed)) % 2**63)
        random.seed(hash((self._base, self._microbatch, place)))
        return states

    def restore_states(self, before: tuple[list[Tensor], Any]) -> None:
        """Restore the states that `depart` returned."""
        for generator, state in zip(self._generators, before[0], strict=True):
            generator.set_state(state)
        random.setstate(before[1])

    def warn_of_different_draws(self) -> None:
        """Warn once if the step draws though stages differ: the last one ran the full batch, others microbatches."""
        if self.left is not None and not self._told:
            self._told = True
            log.warning(
                "The step draws random numbers outside of its blocks. With loss_over='batch', the last stage draws "
                "them for the full batch, the others for each microbatch, so numbers drawn before the blocks and used "
                "after them differ. Draw them in the dataset or its collate_fn, or use microbatches=1"
            )

    def end(self, left: GeneratorStates | None) -> None:
        """End a batch: set the generators to the states `left` of the last stage, or to those at its beginning."""
        self._restore(left or self._first)
