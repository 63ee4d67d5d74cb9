"""Failures: which rank failed first, and whether all ranks are there to go on together.

Ranks meet at the store, so that a rank which comes alone waits for a few seconds and not for the process group's
timeout. See `docs/decisions/0017-ranks-that-handle-an-exception.md`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_parallel.collectives.functional import notes_under
from lightning_parallel.strategies.lightning_package import SIGTERMException

PATIENCE_SECONDS = 3.0
TOGETHER = "_lightning_parallel_together"  # noted on exceptions: to keep one keeps memory
SHOWN, WIDTH = 8, 500
"""How many ranks are told of; how many characters of an error."""

Begun = Mapping[str, int]


class Failure(NamedTuple):
    """What went wrong on a rank, in one line."""

    rank: int
    error: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed first: {self.error}"

    @property
    def is_consequence(self) -> bool:
        """Whether it is but what a rank is told when another one has left it."""
        said = self.error.lower()
        return any(backend in said for backend in ("gloo", "nccl", "connection closed"))


class Failures:
    """What ranks know of each other's failures in one run.

    Args:
        rank: this one.
        ranks: how many there are.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        notes = notes_under("lightning_parallel")
        run = notes.add(f"runs_of_{rank}", 1)  # every rank begins the same runs
        self._store = notes_under(f"run_{run}", notes)
        self._rank, self._ranks = rank, ranks
        self._meetings = 0
        #: whether this rank failed and others did not: nobody will come any more
        self.alone = False

    def forgive(self) -> None:
        """What this rank is handling as the run begins is its script's concern: all ranks have come so far."""
        if (exception := sys.exc_info()[1]) is not None:
            vars(exception).setdefault(TOGETHER, True)

    def all_come(self, what: str, begun: Callable[[], Begun | None]) -> bool:
        """Whether all ranks are there for what this one is about to do, though it may be handling an exception.

        Ranks that handle none do not ask. SIGTERM is an exception too, but all ranks agreed when to raise it.

        Args:
            what: this one is about to do; the same on all ranks that are.
            begun: the collectives that this rank has begun in each of its groups; None where others may wait for more.
        """
        exception = sys.exc_info()[1]
        if self.alone or exception is None or isinstance(exception, SIGTERMException):
            return not self.alone
        noted = vars(exception)
        if TOGETHER not in noted:
            noted[TOGETHER] = self._safely(lambda: self._meet(what, begun()), otherwise=False)
        return bool(noted[TOGETHER])

    def end(self, exception: BaseException, begun: Callable[[], Begun | None]) -> Failure:
        """This rank's run ends by the exception; afterwards `alone` says whether only some ranks' did.

        Returns:
            the failure that everybody should read: of the rank that failed first, or of the first rank if all failed
            alike; else this one's own.
        """
        mine = Failure(self._rank, said_of(exception))
        self._leave(f"error_{self._rank}", mine)
        first = self._leave("first", mine)
        self.alone = not self.all_come("the end of the run", begun)
        if self.alone:
            return first
        told = self._safely(lambda: Failure(*json.loads(self._store.get("error_0"))), otherwise=mine)
        return told if told.error == mine.error else mine

    def _leave(self, key: str, failure: Failure) -> Failure:
        """Leaves a note for the others unless one of them was faster; the one that is there."""
        said = json.dumps(failure)
        found = self._safely(lambda: self._store.compare_set(key, "", said), otherwise=said.encode())
        return Failure(*json.loads(found))

    def _safely(self, ask: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return ask()
        except (RuntimeError, ValueError):  # the process that keeps the store has ended
            return otherwise

    def _meet(self, what: str, begun: Begun | None) -> bool:
        """All ranks come to the same decision, made by the last one to come or by one that waited in vain."""
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
    """Whether ranks are about to do the same, and have begun equally many collectives in the groups that they share."""
    places = [begun for _, begun in said]
    if None in places or len({what for what, _ in said}) > 1:
        return False
    counts: dict[str, int] = {}
    return all(counts.setdefault(group, n) == n for begun in places if begun is not None for group, n in begun.items())


def said_of(exception: BaseException) -> str:
    """An exception in one line."""
    try:
        said = str(exception)
    except Exception as error:  # it is the user's class, and what it fails with must not be told in its place
        said = f"its text cannot be read, for {type(error).__name__}"
    first = next(iter(said.splitlines()), "")
    return f"{type(exception).__name__}: {first[:WIDTH]}"


def named(ranks: Sequence[int]) -> str:
    """Ranks by their numbers, the first of them if they are many."""
    many = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:SHOWN]))}{many}"
