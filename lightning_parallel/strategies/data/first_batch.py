"""The first batch of a loop's loaders, read before the loop does, and kept as the first of its first pass."""

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
    """The first pass of a loop over its loaders, of which the first batch is read before the loop reads it.

    The loop then gets this batch, and the random states that stand after it. A hook may draw meanwhile, for example
    `on_train_start`: loaders with indices then begin their pass anew, so that they shuffle as on one device. Streams,
    which may be readable only once, go on.

    Args:
        loop: of the trainer.
        share_generators: lets what draws the order of loaders stand alike on all ranks.
        host: all ranks, all of which make this at once.

    Raises:
        ValueError: there is nothing to read.
        RuntimeError: another rank could not read.
    """

    def __init__(self, loop: Any, share_generators: Callable[[Sequence[Any]], None], host: dist.ProcessGroup) -> None:
        self._loop, self._begun = loop, RandomState.now()
        loop.setup_data()  # nothing where it has been called
        combined: Any = internals.combined_of(loop)
        self._loaders, self._iterators = ([], None) if combined is None else internals.reading_of(combined, 0)
        if self._iterators is None:
            raise ValueError(
                "a pipeline analyzes a step on one batch before the run, but the trainer's limits leave none to read, "
                "or it is too early to read one"
            )
        share_generators(self._loaders)
        generators = [generator for loader in self._loaders for generator in generators_of(loader)]
        self._made, self._own = RandomState.now(), [(each, each.get_state()) for each in generators]
        #: the first batch as the loaders yield it, in the structure in which the user gave them
        self.batch = run_or_raise_on_all(self._first, "read a first batch", host, combined)
        self._read = RandomState.now()
        self._begun.restore()

    def _first(self, combined: Any) -> Any:
        if (fetched := internals.fetched_first(self._loop)) is not None:
            return fetched
        read = []
        for reading, loader in zip(self._iterators or (), self._loaders, strict=True):
            try:
                read.append(reading.peek())
            except StopIteration:
                source = getattr(undivided(loader), "dataset", undivided(loader))
                raise ValueError(
                    f"a {type(source).__name__} yields nothing, but a pipeline analyzes a step before the "
                    "first batch; give a loader that has samples whenever it is read"
                ) from None
        return read[0] if internals.reads_in_turn(combined) else internals.as_given(combined, read)

    def loop_has_made_loaders(self) -> None:
        """Lightning has called `setup_data`, by which one device makes the loaders and draws seeds for workers."""
        if RandomState.now().equals(self._begun):
            self._made.restore()

    def begin(self, combined: Any) -> bool:
        """A loop is about to read these loaders; return whether it is this one."""
        if combined is not internals.combined_of(self._loop):
            return False
        if combined is None or internals.reading_of(combined, 0)[1] != self._iterators:
            return True  # a checkpoint has had them begin anew
        now = RandomState.now()
        if now.equals(self._made):
            self._read.restore()
        elif all(
            isinstance(each, DataLoader) and not isinstance(each.dataset, IterableDataset) for each in self._loaders
        ):
            self._begun.restore()
            for generator, state in self._own:
                generator.set_state(state)
            internals.restart_loaders(self._loop, load=False)
            now.restore()
        return True
