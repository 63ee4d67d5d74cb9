"""Failures and signals: which rank failed first, whether all ranks can go on together, and how they stop.

A rank that fails must not begin a collective in which other ranks do not take part. So before a collective, ranks that
handle an exception check in at the store of the process group, where a rank that comes alone waits for 3 seconds
instead of the timeout of the group. See `docs/decisions/0017-signals-and-exceptions.md`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from lightning_parallel.collectives.functional import call_with_timeout, prefix_store
from lightning_parallel.strategies.lightning_package import SIGTERMException, SLURMEnvironment, Trainer

PATIENCE_SECONDS = 3.0
# an attribute of the exception, because a table of exceptions would keep their frames alive
TOGETHER = "_lightning_parallel_together"
MAX_CHARACTERS = 500
INTERRUPTED = b"\nAll ranks stop before their next batch; SIGINT (Ctrl-C) once more ends this process at once\n"
EXIT_CODE = 128 + signal.SIGTERM


class Failure(NamedTuple):
    """The rank of an exception, and its text in one line."""

    rank: int
    error: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed first: {self.error}"


class Failures:
    """Exchanges failures between the ranks of one run, through the store of the process group.

    Args:
        rank: this rank.
        ranks: number of ranks.
        begun: returns the number of collectives that this rank has begun, by group name; None if other ranks may wait
            for more.

    Attributes:
        alone: whether this rank's run has failed and those of others have not: collectives must be skipped.
    """

    def __init__(self, rank: int, ranks: int, begun: Callable[[], Mapping[str, int] | None]) -> None:
        notes = prefix_store("lightning_parallel")
        run = notes.add(f"runs_of_{rank}", 1)  # every rank begins the same runs
        self._store, self._answers = prefix_store(f"run_{run}", notes), True
        self._rank, self._ranks, self._begun, self._meetings = rank, ranks, begun, 0
        self.alone = False
        if (exception := sys.exc_info()[1]) is not None:  # the script handles it while it begins a run on all ranks
            vars(exception).setdefault(TOGETHER, True)

    def all_ranks_come(self, what: str) -> bool:
        """Return whether all ranks come to the collective `what`, which must have the same name on all ranks.

        True without a message if no exception is handled, or all ranks raised it together, as on SIGTERM and SIGINT.
        """
        exception = sys.exc_info()[1]
        if self.alone or exception is None:
            return not self.alone
        if TOGETHER not in vars(exception):
            vars(exception)[TOGETHER] = self._ask(False, self._meet, what)
        return bool(vars(exception)[TOGETHER])

    def end(self, exception: BaseException) -> Failure:
        """Set `alone` after an exception ended this rank's run; return the failure of the rank that failed first."""
        mine = json.dumps(Failure(self._rank, one_line(exception)))
        # the first rank to fail sets the note; all others read it
        first = self._ask(mine, self._store.compare_set, "first", "", mine)
        self.alone = not self.all_ranks_come("the end of the run")
        return Failure(*json.loads(first))

    def _ask(self, otherwise: Any, ask: Callable[..., Any], *args: Any) -> Any:
        """Call `ask`, which uses the store; return `otherwise` if the store's process has ended or does not answer."""
        if self._answers:
            with suppress(RuntimeError, ValueError):
                return call_with_timeout(2 * PATIENCE_SECONDS, ask, *args)
            self._answers = False
        return otherwise

    def _meet(self, what: str) -> bool:
        """Wait for all ranks; return whether they can go on. The last rank to arrive decides, or the first timeout."""
        self._meetings += 1
        meeting, begun = prefix_store(f"meeting_{self._meetings}", self._store), self._begun()
        # set before this rank counts itself: the last rank to arrive reads the notes of all
        meeting.set(str(self._rank), json.dumps([what, begun]))
        if begun is None:
            meeting.compare_set("together", "", "no")
        if meeting.add("here", 1) == self._ranks:
            notes = [json.loads(meeting.get(str(rank))) for rank in range(self._ranks)]
            counts: dict[str, int] = {}
            # if numbers differ, some rank would wait in a collective that others have not begun
            equal = all(counts.setdefault(group, n) == n for _, one in notes for group, n in (one or {}).items())
            meeting.compare_set("together", "", "yes" if equal and len({what for what, _ in notes}) == 1 else "no")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not meeting.check(["together"]) and time.monotonic() < deadline:
            time.sleep(0.02)
        return bool(meeting.compare_set("together", "", "no") == b"yes")


def one_line(exception: BaseException) -> str:
    """Return an exception's type and first line; for one that a DataLoader worker raised, also its cause."""
    try:
        first, *lines = str(exception).splitlines() or [""]
    except Exception as error:  # `__str__` of a user's class may raise
        first, lines = f"its text cannot be read ({type(error).__name__})", []
    if heads := [number for number, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")]:
        after = lines[heads[-1] + 1 :]  # the first line without indent is the worker's exception
        first = f"{first.rstrip('.')}: {next((line for line in after if not line.startswith(' ')), '')}"
    return f"{type(exception).__name__}: {first[:MAX_CHARACTERS]}"


class Signals:
    """Handles SIGTERM, SLURM's requeue signal, and SIGINT if the user has no handler for it, during one run.

    A handler only records the signal, and all ranks act on it between two batches: the message about every batch
    (`Message`) carries it to all ranks. Lightning answers SIGTERM with a collective inside the handler, which deadlocks
    if only one rank gets the signal, and saves a checkpoint inside the handler when SLURM asks to requeue.

    Attributes:
        stop: number of the signal that asked this process to stop (the higher one of two); 0 if there was none.
        requeue: whether SLURM has asked to requeue the job.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.stop, self.requeue = 0, False
        self._trainer, self._process = trainer, os.getpid()
        self._replaced: dict[int, Any] = {}  # Lightning's handlers, or Python's
        self._requeue_signal: int | None = None

    def install(self, back: ExitStack) -> None:
        """Replace the handlers that Lightning has just installed, until `back` is closed."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
            return
        environment = self._trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._requeue_signal = environment.requeue_signal
        for number in (signal.SIGTERM, signal.SIGINT, self._requeue_signal):
            users = number == signal.SIGINT and signal.getsignal(number) is not signal.default_int_handler
            if number and not users:
                before = self._replaced[number] = signal.signal(number, self._note)
                back.callback(signal.signal, number, before)

    def answer(self, stop: int, requeue: bool) -> None:
        """Act on the signals of any rank. Called on all ranks between two batches, with the same arguments.

        Raises:
            SIGTERMException: a rank got SIGTERM.
            KeyboardInterrupt: a rank got SIGINT.
        """
        if requeue and self._requeue_signal is not None:
            self.requeue = False
            self._replaced[self._requeue_signal](self._requeue_signal, None)  # Lightning saves and requeues the job
        if stop:
            exception = SIGTERMException(EXIT_CODE) if stop == signal.SIGTERM else KeyboardInterrupt()
            vars(exception)[TOGETHER] = True  # all ranks raise it here, so exception hooks may save a checkpoint
            raise exception

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == self._requeue_signal:
            self.requeue = True
            return
        signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
        self.stop = max(number, self.stop)
        if os.getpid() != self._process:  # in a process forked from a rank
            if get_worker_info() is None:  # DataLoader workers go on until their rank stops; others end now
                os.kill(os.getpid(), number)
        elif number == signal.SIGINT and self._trainer.local_rank == 0:
            os.write(2, INTERRUPTED)  # `print` is not reentrant
