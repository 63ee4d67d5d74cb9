"""DataLoaders whose batches are a rank's parts: copies of the user's own, which know shares and their position."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from lightning_parallel.strategies.data.samplers import GLOBAL_BATCH, DividedSampler, length_of
from lightning_parallel.strategies.data.shares import Pass, PassNotes, Readers, Reading, Share


@dataclass(frozen=True)
class Counted:
    """Something out of an iterable dataset that is part of an uneven global batch."""

    value: Any
    share: Share


class CollateCounted:
    """Collates samples as the user does, keeping beside the batch how much it counts."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:  # noqa: D102
        first = samples[0] if isinstance(samples, list) and samples else samples
        if not isinstance(first, Counted):
            return self.collate(samples)
        plain = [sample.value for sample in samples] if isinstance(samples, list) else samples.value
        return Counted(self.collate(plain), first.share)


class DividedLoader(DataLoader[Any]):
    """Mixed into the class of the user's DataLoader: knows shares, and its position for checkpoints."""

    undivided: DataLoader[Any]
    divided: DividedSampler | None
    latest: Pass
    batches_done: Callable[[], int]
    content: Callable[[Any], int] | None

    def __iter__(self) -> Any:
        batches, divided = super().__iter__(), self.divided
        if divided is None:
            notes = PassNotes()
            reading = Reading(_plain(self._noting_states(batches), notes), lambda: notes, self.content)
        else:
            reading = Reading(batches, lambda: divided.latest, self.content)
        self.latest = reading.known
        return reading

    def _noting_states(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches


def _plain(batches: Iterator[Any], notes: PassNotes) -> Iterator[Any]:
    for number, batch in enumerate(batches):
        if isinstance(batch, Counted):
            notes.uneven[number] = batch.share
            batch = batch.value
        yield batch


class ResumableLoader(DividedLoader):
    """A divided loader over samples with indices, whose position a checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch."""
        assert self.divided is not None
        return self.divided.position_after(self.batches_done())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next epoch starts where the state stood.

        Raises:
            ValueError: the state is another loader's, or of global batches of another size.
        """
        assert self.divided is not None
        if "consumed" not in state:
            raise _other_state(state)
        self.divided.go_on_from(state)


class StatefulStream(DividedLoader):
    """A divided loader over a stream that has a state of its own, as torchdata's `StatefulDataLoader`.

    Lightning reads one batch ahead of the step where a loader has no length. A checkpoint needs the state before that
    batch: 2 where batch 2 has been trained and batch 3 has been read.
    """

    readers: Readers
    _states: Mapping[int, tuple[int, Any]] = {}  # after each number of batches: the batches into the epoch, the state
    _resumes_after = 0

    def state_dict(self) -> dict[str, Any]:
        """The loader's own state after the batches that were trained, their number, and the size of a global batch."""
        done = self.batches_done()
        batches, own = self._states.get(done) or (done, self._own_state())
        return {"batches": batches, GLOBAL_BATCH: self._global_batch, "own": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next epoch starts where the state stood.

        Raises:
            ValueError: the state is another loader's, or of global batches of another size.
        """
        if "own" not in state:
            raise _other_state(state)
        if state["batches"]:
            self.readers.require_same_batches(state[GLOBAL_BATCH], self._global_batch)
        self._resumes_after = state["batches"]
        super().load_state_dict(state["own"])  # type: ignore[misc]

    @property
    def _global_batch(self) -> int:
        return (self.batch_size or 1) * self.readers.ranks

    def _own_state(self) -> Any:
        return copy.deepcopy(super().state_dict())  # type: ignore[misc]

    def _noting_states(self, batches: Iterator[Any]) -> Iterator[Any]:
        if length_of(self) is not None:  # nothing is read ahead
            yield from batches
            return
        done, self._resumes_after = self._resumes_after, 0
        self._states = {done: (done, self._own_state())}
        for batch in batches:
            done += 1
            self._states = {done - 1: self._states[done - 1], done: (done, self._own_state())}
            yield batch
        self._states = {**self._states, done: (0, self._own_state())}  # the epoch has ended


def _other_state(state: Mapping[str, Any]) -> ValueError:
    return ValueError(
        f"the checkpoint holds a loader's state that another strategy wrote ({', '.join(state)}), but data divided "
        "among ranks goes on from what this strategy writes; take one of the end of an epoch, without the state: "
        'checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader")'
    )


def outlives_epochs(state: Any) -> bool:
    """Whether the next epoch depends on a state of the end of an epoch: a loader's own, or one with a generator."""
    is_ours = isinstance(state, dict) and GLOBAL_BATCH in state
    return is_ours and ("own" in state or state["random"]["own"] is not None)
