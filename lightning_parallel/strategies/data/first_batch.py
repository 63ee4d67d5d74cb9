"""Reads the first batch of a loop's loaders ahead of the loop, which then gets it as the first batch of its pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies.data.loaders import undivided
from lightning_parallel.strategies.data.randomness import RandomState, generators_of
from lightning_parallel.strategies.ranks.agreement import run_or_raise_on_all


class FirstPass:
    """First pass of a loop over its loaders, whose first batch is read ahead, for a pipeline to analyze a step on it.

    The loop then gets this batch, with the random states after it. If a hook has drawn random numbers in between, e.g.
    `on_train_start`, loaders with indices begin their pass again, so that they shuffle as on one device. Streams, which
    may be readable only once, continue.

    Args:
        loop: the trainer's loop.
        share_generators: sets the generators that determine the order of loaders to rank 0's.
        host: group of all ranks; the constructor is collective over it.

    Raises:
        ValueError: there is no batch to read.
        RuntimeError: another rank could not read its batch.
    """

    def __init__(self, loop: Any, share_generators: Callable[[Sequence[Any]], None], host: dist.ProcessGroup) -> None:
        self._loop, self._begun = loop, RandomState.now()
        loop.setup_data()  # does nothing if it was called before
        combined: Any = internals.combined_of(loop)
        self._loaders, self._iterators = ([], None) if combined is None else internals.current_loaders(combined, 0)
        if self._iterators is None:
            raise ValueError(
                "a pipeline analyzes a step on one batch before the run, but the trainer's limits leave none, or it "
                "is too early to read one"
            )
        share_generators(self._loaders)
        generators = [generator for loader in self._loaders for generator in generators_of(loader)]
        self._made, self._own = RandomState.now(), [(each, each.get_state()) for each in generators]
        #: the first batch as the loaders yield it, in the structure in which the user gave them
        self.batch = run_or_raise_on_all(self._first, "read a first batch", host, combined)
        self._read = RandomState.now()
        self._begun.restore()

    def _first(self, combined: Any) -> Any:
        if (fetched := internals.prefetched_batch(self._loop)) is not None:
            return fetched
        read = []
        for reading, loader in zip(self._iterators or (), self._loaders, strict=True):
            try:
                read.append(reading.peek())
            except StopIteration:
                source = getattr(undivided(loader), "dataset", undivided(loader))
                raise ValueError(
                    f"a {type(source).__name__} yields nothing, but a pipeline analyzes a step before the "
                    "first batch; give a loader that yields samples each time"
                ) from None
        return read[0] if internals.reads_in_turn(combined) else internals.as_given(combined, read)

    def after_setup_data(self) -> None:
        """Set the random states as if Lightning's `setup_data`, just called, had made the loaders and drawn seeds."""
        if RandomState.now().equals(self._begun):
            self._made.restore()

    def begin(self, combined: Any) -> bool:
        """Set the random states if the loop that is about to read its loaders is this one; return whether it is."""
        if combined is not internals.combined_of(self._loop):
            return False
        if combined is None or internals.current_loaders(combined, 0)[1] != self._iterators:
            return True  # the loaders were restarted, from a checkpoint
        now = RandomState.now()
        if now.equals(self._made):
            self._read.restore()
        elif all(
            isinstance(each, DataLoader) and not isinstance(each.dataset, IterableDataset) for each in self._loaders
        ):
            # a hook has drawn: begin the pass again, with this hook's random state
            self._begun.restore()
            for generator, state in self._own:
                generator.set_state(state)
            internals.restart_loaders(self._loop, load=False)
            now.restore()
        return True
