"""A roll call before ranks form a group: who has come, who has not, and who came and died.

Torch waits for the process group's timeout until all ranks have joined, and says neither who is missing nor why. So
ranks meet before that in a store at the same address, and show there that they live; one that fails sooner leaves the
reason.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from lightning_parallel.collectives.functional import notes_at
from lightning_parallel.strategies.lightning_package import ClusterEnvironment
from lightning_parallel.strategies.ranks.failures import named, said_of

LOOKS_SECONDS, CONNECTS_SECONDS = 0.2, 10.0
TELLS_SECONDS = 10.0
"""After which a rank that waits says for whom; then after twice as many, and so on."""
SHARE, SILENT_SECONDS = 0.3, 15.0
"""A rank that came is taken for dead when it was silent for so long, or for this share of the timeout."""
PATIENCE_SECONDS = 3.0
"""For which a rank waits until those that have come have read why it ends, as rank 0 does, with which the store ends,
and each that torchrun started, which then ends the others. Ranks that have not come are given `SILENT_SECONDS`."""


class RollCall:
    """One rank's part in it.

    Args:
        environment: says where ranks meet, which this is, and how many there are.
    """

    def __init__(self, environment: ClusterEnvironment) -> None:
        self._environment = environment
        self._begun, self._silent = False, SILENT_SECONDS
        self._notes: Any = None
        self._seen: dict[int, tuple[int, float]] = {}  # how often a rank has shown that it lives, and since when
        self._watching: tuple[threading.Event, threading.Thread] | None = None

    def wait(self, timeout: timedelta) -> None:
        """Returns when all ranks have come.

        Raises:
            RuntimeError: on all ranks that have come: another failed or died, or did not come within the timeout.
        """
        self._begun, began, told = True, time.monotonic(), TELLS_SECONDS
        self._seen.clear()
        self._silent = min(SILENT_SECONDS, SHARE * timeout.total_seconds())
        while missing := self._look():
            waited = time.monotonic() - began
            late = f"{named(missing)} of {self._ranks} did not come to {self._where} within {waited:.0f} s"
            if waited > timeout.total_seconds():
                self._end(f"{late}, the strategy's timeout; look at what {named(missing)} printed last")
            if waited > told:
                told *= 2
                print(f"[rank{self._rank}] {late}; still waiting", file=sys.stderr, flush=True)
            time.sleep(LOOKS_SECONDS)
        closed = threading.Event()
        self._watching = closed, threading.Thread(target=self._watch, args=[closed], daemon=True)
        self._watching[1].start()

    def close(self) -> None:
        """The ranks have formed a group."""
        if self._watching is None:
            return
        closed, thread = self._watching
        closed.set()
        thread.join()
        for name in (f"beats_{self._rank}", *["here"] * (self._rank == 0)):
            self._notes.delete_key(name)  # the store may live on, and these ranks meet in it again
        self._notes = self._watching = None

    def failed(self, exception: BaseException) -> None:
        """Leaves word of a failure for ranks that come, unless this one has come itself."""
        if self._begun or self._ranks == 1 or dist.is_initialized():
            return
        self._begun = True
        with suppress(RuntimeError):
            self._meet(self._silent)  # rank 0 may start later than this one fails
            self._leave(f"{named([self._rank])} failed before it could join the others: {said_of(exception)}")
            self._linger()

    def tell_of_failures(self) -> None:
        """Should the script fail before this rank has come, the others are told."""
        if self._ranks == 1 or dist.is_initialized():
            return
        shown = sys.excepthook

        def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            shown(kind, value, trace)
            self.failed(value)

        sys.excepthook = show

    # ---------------------------------------------------------------- in the store

    @property
    def _rank(self) -> int:
        return self._environment.global_rank()

    @property
    def _ranks(self) -> int:
        return self._environment.world_size()

    @property
    def _where(self) -> str:
        return f"{self._environment.main_address}:{self._environment.main_port}"

    @property
    def _keeps_the_store(self) -> bool:
        return self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)

    def _meet(self, seconds: float) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        place = self._environment.main_address, self._environment.main_port
        self._notes = notes_at(f"lightning_parallel_joins_{attempt}", *place, self._keeps_the_store, seconds)

    def _look(self) -> Sequence[int]:
        """Shows that this rank lives; the ranks that have not come, as far as it knows."""
        if self._notes is None:
            try:
                self._meet(CONNECTS_SECONDS)
            except dist.DistNetworkError:
                if self._keeps_the_store:
                    raise
                return [0]
        try:
            return self._looked()
        except dist.DistNetworkError:
            raise RuntimeError(
                f"the process at {self._where} ended while ranks joined: that is rank 0, or the launcher of the first "
                "node; look at what it printed last"
            ) from None

    def _looked(self) -> Sequence[int]:
        self._notes.add(f"beats_{self._rank}", 1)
        watched = range(1, self._ranks) if self._rank == 0 else [0]
        missing = [rank for rank in watched if not self._lives(rank)]
        if self._notes.check(["verdict"]):
            self._end("")
        if self._rank == 0:
            self._notes.set("missing" if missing else "here", ",".join(map(str, missing)))
            return missing
        if self._notes.check(["here"]):
            return []
        return missing or _ranks_in(self._notes) or [0]

    def _lives(self, rank: int) -> bool:
        """Whether a rank has come; raises if it has died since."""
        beats, now = int(self._notes.add(f"beats_{rank}", 0)), time.monotonic()
        before, since = self._seen.setdefault(rank, (beats, now))
        if beats != before:
            self._seen[rank] = (beats, now)
        elif beats and now - since > self._silent:
            self._end(
                f"{named([rank])} came to {self._where}, and has been silent for {now - since:.0f} s: it was killed "
                "or stopped before all had joined; look at what it printed last, and at its host's log (memory)"
            )
        return beats > 0

    def _end(self, verdict: str) -> NoReturn:
        """Raises on all ranks what the first one said."""
        said = self._leave(verdict)
        self._linger()
        raise RuntimeError(said)

    def _leave(self, verdict: str) -> str:
        return str(self._notes.compare_set("verdict", "", verdict).decode())

    def _linger(self) -> None:
        """Waits until the others have heard, if they can only as long as this rank is there: then they print it."""
        began = time.monotonic()
        self._notes.add(f"heard_{self._rank}", 1)
        if not self._keeps_the_store and not dist.is_torchelastic_launched():
            return
        dead = {rank for rank, (beats, since) in self._seen.items() if beats and began - since > 1}
        others = [rank for rank in range(self._ranks) if rank not in dead]
        while unheard := [rank for rank in others if not self._notes.add(f"heard_{rank}", 0)]:
            have_come = all(self._notes.add(f"beats_{rank}", 0) for rank in unheard)
            if time.monotonic() - began > max(PATIENCE_SECONDS, 0 if have_come else self._silent):
                return
            time.sleep(0.02)

    def _watch(self, closed: threading.Event) -> None:
        """While the group is formed: that can take as long as the timeout where a rank dies now."""
        try:
            while not closed.wait(LOOKS_SECONDS):
                self._look()
        except RuntimeError as error:
            print(f"[rank{self._rank}] {error}", file=sys.stderr, flush=True)


def _ranks_in(notes: Any) -> list[int]:
    """Those that rank 0 misses, as it has last said."""
    said = notes.get("missing").decode() if notes.check(["missing"]) else ""
    return [int(rank) for rank in said.split(",") if rank]
