"""Failures: which rank failed first, and whether all ranks can go on together.

A rank that fails must not begin a collective to which others do not come. So ranks that handle an exception meet at the
process group's store, where a rank that comes alone waits for 3 seconds rather than for the timeout. See
`docs/decisions/0017-ranks-that-handle-an-exception.md`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from lightning_parallel.collectives.functional import answer_of, notes_under

PATIENCE_SECONDS = 3.0
TOGETHER = "_lightning_parallel_together"  # kept on the exception: a reference to an exception keeps its frames alive
MAX_CHARACTERS = 500

Begun = Mapping[str, int]
"""The number of collectives that a rank has begun in each of its groups, by the group's name."""


class Failure(NamedTuple):
    """An exception on a rank, in one line."""

    rank: int
    error: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed first: {self.error}"

    @property
    def is_consequence(self) -> bool:
        """Whether it is only what a backend reports when another rank has left."""
        said = self.error.lower()
        return any(backend in said for backend in ("gloo", "nccl", "connection closed"))


class Failures:
    """What ranks know of each other's failures in one run.

    Args:
        rank: this rank.
        ranks: the number of ranks.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        notes = notes_under("lightning_parallel")
        run = notes.add(f"runs_of_{rank}", 1)  # every rank begins the same runs
        self._store: Any = notes_under(f"run_{run}", notes)
        self._rank, self._ranks, self._meetings = rank, ranks, 0
        #: whether this rank's run has failed and those of others have not: collectives must be skipped
        self.alone = False
        if (exception := sys.exc_info()[1]) is not None:  # the script handles it while it begins a run on all ranks
            vars(exception).setdefault(TOGETHER, True)

    def all_come(self, what: str, begun: Callable[[], Begun | None]) -> bool:
        """Return whether all ranks are there for what this one is about to do.

        Ranks that handle no exception do not ask, nor do those that raised it together, as on SIGTERM and SIGINT.

        Args:
            what: the name of what is about to be done; the same on all ranks that do it.
            begun: this rank's collectives so far; None where others may wait for more of them.
        """
        exception = sys.exc_info()[1]
        if self.alone or exception is None:
            return not self.alone
        if TOGETHER not in vars(exception):
            vars(exception)[TOGETHER] = self._ask(lambda: self._meet(what, begun()), otherwise=False)
        return bool(vars(exception)[TOGETHER])

    def end(self, exception: BaseException, begun: Callable[[], Begun | None]) -> Failure:
        """End this rank's run by the exception, set `alone`, and return the failure of the rank that failed first."""
        mine = Failure(self._rank, one_line(exception))
        said = json.dumps(mine)
        found = self._ask(lambda: self._store.compare_set("first", "", said), otherwise=said.encode())
        self.alone = not self.all_come("the end of the run", begun)
        return Failure(*json.loads(found))

    def _ask(self, ask: Callable[[], Any], otherwise: Any) -> Any:
        """Ask the store; the process that keeps it may have ended, or be stopped."""
        if self._store is not None:
            with suppress(RuntimeError, ValueError):
                return answer_of(ask, 2 * PATIENCE_SECONDS)
            self._store = None
        return otherwise

    def _meet(self, what: str, begun: Begun | None) -> bool:
        """Wait for the others. The last rank to come decides for all, or one that has waited in vain."""
        self._meetings += 1
        meeting = notes_under(f"meeting_{self._meetings}", self._store)
        meeting.set(str(self._rank), json.dumps([what, begun]))
        if begun is None:
            meeting.compare_set("together", "", "no")
        if meeting.add("here", 1) == self._ranks:
            said = [json.loads(meeting.get(str(rank))) for rank in range(self._ranks)]
            meeting.compare_set("together", "", "yes" if _at_one_place(said) else "no")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not meeting.check(["together"]) and time.monotonic() < deadline:
            time.sleep(0.02)
        return bool(meeting.compare_set("together", "", "no") == b"yes")


def _at_one_place(said: list[tuple[str, Begun | None]]) -> bool:
    """Whether ranks are about to do the same, after equally many collectives in the groups that they share."""
    places = [begun for _, begun in said]
    if None in places or len({what for what, _ in said}) > 1:
        return False
    counts: dict[str, int] = {}
    return all(counts.setdefault(group, n) == n for begun in places if begun is not None for group, n in begun.items())


def one_line(exception: BaseException) -> str:
    """An exception's type and first line; of one that torch brings from a loader's worker, its cause too."""
    try:
        lines = str(exception).splitlines() or [""]
    except Exception as error:  # the class is the user's
        lines = [f"its text cannot be read, for {type(error).__name__}"]
    said = lines[0]
    if heads := [number for number, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")]:
        after = lines[heads[-1] + 1 :]
        said = f"{said.rstrip('.')}: {next((line for line in after if not line.startswith(' ')), '')}"
    return f"{type(exception).__name__}: {said[:MAX_CHARACTERS]}"


def add_note(exception: BaseException, *texts: str) -> None:
    """Add texts that Python, torchrun and torch's launcher print below the exception's traceback."""
    if any(texts):
        vars(exception).setdefault("__notes__", []).extend(filter(None, texts))  # `add_note` came with Python 3.11


def tell_torchrun(exception: BaseException) -> None:
    """Write the traceback to where torchrun looks for the one that it prints at the end."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(exception, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler  # torchrun's processes have it

        get_error_handler().record_exception(exception)
