"""A thread that reports a hang before the backend gives up: which rank is behind, and at which line of the user's code.

A backend ends a collective that waited longer than its timeout, and says neither which rank did not come nor where that
rank is. So a rank that stood still for 0.7 of that time asks all others through the store of the process group, and all
ranks write there where they are.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_parallel.collectives.functional import Unanswered, answer_of, notes_under
from lightning_parallel.strategies.lightning_package import Trainer, lightning, lightning_fabric

PATIENCE = 0.7
"""Of the timeout: a rank that stood still for so long asks where the others are. The rest is for them to answer."""
POLLS, POLL_SECONDS = 30, (0.1, 15.0)
"""How often a rank is polled within a timeout, and the least and most seconds between two polls."""
MAX_RANKS = 8
PACKAGE = Path(__file__).parents[2]
LIBRARIES = (
    *(f"{Path(str(module.__file__)).parent}{os.sep}" for module in (lightning, lightning_fabric, torch)),
    f"{PACKAGE}{os.sep}",
    contextlib.__file__,
)
WAITING = (str(PACKAGE), str(Path(str(dist.__file__)).parent))
SILENT = "says nothing: it is stopped, or has ended"


class Place(NamedTuple):
    """Where a rank is.

    Attributes:
        waits: whether it is in a collective, as far as Python shows, and not in code of the user's or a library's.
        step: the optimizer's step.
        function: the collective, or else the innermost function, with its line.
        stack: the script's lines that led there, outermost first.
        begun: the number of collectives that it has begun in each group.
        seconds: for how long it has been there.
    """

    waits: bool
    step: int
    function: str
    stack: list[str]
    begun: Mapping[str, int]
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{'waits' if self.waits else 'is'} in {self.function} of step {self.step}"


class Watchdog:
    """Watches the thread that made it, from one of its own, until it is stopped or has reported a hang.

    At each poll:
        - If this rank is at one place for 0.7 of the timeout, it asks all ranks.
        - If some rank asked, each writes its place in the store and reads those of all others.
        - If others waited that long for some ranks, it reports their places and its own. Else it goes on polling.

    Args:
        rank: this rank.
        ranks: the number of ranks.
        timeout: of collectives.
        trainer: whose step is told.
        begun: returns the number of collectives that this rank has begun in each of its groups.

    Attributes:
        report: of a hang: who is behind in the first line, then a line for each of some ranks; else empty.
    """

    def __init__(
        self, rank: int, ranks: int, timeout: timedelta, trainer: Trainer, begun: Callable[[], Mapping[str, int]]
    ) -> None:
        self._rank, self._ranks, self._trainer, self._begun = rank, ranks, trainer, begun
        seconds = timeout.total_seconds()
        self._patience = PATIENCE * seconds
        self._answering = min(0.2 * seconds, 60.0) + 2.0  # all but silent ranks answer at once
        self._period = min(max(seconds / POLLS, POLL_SECONDS[0]), POLL_SECONDS[1])
        notes = notes_under("lightning_parallel_watchdog")
        self._notes = notes_under(f"run_{notes.add(f'runs_of_{rank}', 1)}", notes)
        self._watched, self._stopped = threading.get_ident(), threading.Event()
        self.report = ""
        self._reported_at: tuple[int, Mapping[str, int]] = (0, {})
        self._thread = threading.Thread(target=self._watch, name="lightning_parallel watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> str:
        """End the thread, once it has written the report that it may be writing, and return that."""
        self._stopped.set()
        self._thread.join(timeout=self._answering)
        return self.report

    def hang_summary(self) -> str:
        """Return who is behind in a hang that goes on, in one line; empty where this rank has gone on since."""
        self.stop()
        return self.report.partition("\n")[0] if self._reported_at == (self._trainer.global_step, self._begun()) else ""

    def _watch(self) -> None:
        place, since, number = self._place(), time.monotonic(), 0
        try:
            while not self._stopped.wait(self._period) and not self.report:
                if (now := self._place()) != place:
                    place, since = now, time.monotonic()
                seconds, round_ = time.monotonic() - since, notes_under(f"round_{number}", self._notes)

                def is_asked(asks: bool = seconds > self._patience, round_: Any = round_) -> bool:
                    if asks:
                        round_.set("asked", "")
                    return bool(round_.check(["asked"]))

                # some rank hangs: every rank answers, whether it hangs or not
                if answer_of(self._answering, is_asked):
                    self._tell(round_, place._replace(seconds=seconds))
                    since, number = time.monotonic(), number + 1
        except Unanswered as error:
            self._print(f"ranks wait; {error}", place)
        except RuntimeError:  # the store's process has ended, and the run with it
            return

    def _place(self) -> Place:
        # `faulthandler` writes file, line and function of the innermost 100 frames of each thread in one go. Frames of
        # `sys._current_frames` can be freed while one reads them, for the thread goes on: Python 3.11 then read memory
        # of something else.
        memory = sys.platform == "linux"  # a disk may be full, or gone
        with open(os.memfd_create("frames"), "w+") if memory else tempfile.TemporaryFile("w+") as written:
            faulthandler.dump_traceback(written, all_threads=True)
            written.seek(0)
            section = re.search(rf"hread 0x0*{self._watched:x} .*\n((?:  .*\n)*)", written.read())
        found = re.findall(r'  File "(.*)", line (\d+) in (.*)', section[1] if section else "")
        # outermost first
        frames = [(path, int(at), name) for path, at, name in found[::-1]] or [("an unknown place", 0, "unknown code")]
        own = [frame for frame in frames if not frame[0].startswith(LIBRARIES)] or frames[:1]
        waits = frames[-1][0].startswith(WAITING)
        collectives = [frame for frame in frames if frame[0].endswith("distributed_c10d.py")]
        file, line, function = (collectives if waits and collectives else frames)[-1]
        stack = [f"{each}:{number} in {name}" for each, number, name in own]
        return Place(waits, self._trainer.global_step, f"{function} ({Path(file).name}:{line})", stack, self._begun())

    def _tell(self, round_: Any, place: Place) -> None:
        """Write this rank's place, read those of all others, and report them if some have waited that long."""
        keys = [str(rank) for rank in range(self._ranks)]
        round_.set(keys[self._rank], json.dumps(place))
        deadline = time.monotonic() + self._answering
        while time.monotonic() < deadline and not round_.check(keys):
            time.sleep(0.05)
        places = {rank: Place(*json.loads(round_.get(key))) for rank, key in enumerate(keys) if round_.check([key])}
        behind = ranks_behind(places, self._ranks)
        waiting = [place for rank, place in places.items() if rank not in behind and (behind or place.waits)]
        if not any(place.seconds > 0.9 * self._patience for place in waiting):
            return
        lines = [summary(places, behind)]
        for rank in [*sorted({*(behind or places)} - {self._rank})[:MAX_RANKS], self._rank]:
            there, where = places.get(rank), SILENT
            if there is not None:
                where = f"{there} for {there.seconds:.0f} s, at {' < '.join(there.stack[:-5:-1])}"
            lines.append(f"rank {rank} {where}")
        self._print("\n  ".join(lines), places[self._rank])

    def _print(self, report: str, place: Place) -> None:
        print(f"[rank{self._rank}] {report}", file=sys.stderr, flush=True)
        self._reported_at, self.report = (place.step, place.begun), report


def ranks_behind(places: Mapping[int, Place], ranks: int) -> list[int]:
    """Return silent ranks; else those that have begun fewer collectives than others, or do not wait as others do.

    Where each rank has begun fewer in some group, some left a collective out and went on to the next: those that are
    late in other groups than most are, or none where these are half of all.
    """
    if silent := [rank for rank in range(ranks) if rank not in places]:
        return silent
    most: dict[str, int] = {}
    for place in places.values():
        most |= {group: max(n, most.get(group, 0)) for group, n in place.begun.items()}
    late_in = {rank: frozenset(g for g, n in place.begun.items() if n < most[g]) for rank, place in places.items()}
    late = [rank for rank, groups in late_in.items() if groups]
    busy = [rank for rank, place in places.items() if not place.waits]
    found = [rank for rank in late if rank in busy] or late or busy
    if len(found) < ranks:
        return found
    common = Counter(late_in.values()).most_common()
    if len(common) == 1 or common[-1][1] == common[-2][1]:
        return []
    return [rank for rank, groups in late_in.items() if groups == common[-1][0]]


def summary(places: Mapping[int, Place], behind: Sequence[int]) -> str:
    """In one line: who is behind, and where the first of them is; where the others wait."""
    others = [place for rank, place in places.items() if rank not in behind]
    longest = max(others, key=attrgetter("waits", "seconds"))
    there = f"wait in {longest.function} of step {longest.step}"
    if behind:
        first = places.get(behind[0])
        where = SILENT if first is None else f"{first}, at {first.stack[-1]}"
        more = f" and {len(behind) - MAX_RANKS} more" if len(behind) > MAX_RANKS else ""
        ranks = ", ".join(map(str, behind[:MAX_RANKS])) + more
        who = f"ranks {ranks} are behind: rank {behind[0]}" if behind[1:] else f"rank {ranks} is behind: it"
        if first is not None and first.waits:  # they wait in unlike collectives: either may be too many
            there += f", at {longest.stack[-1]}; read tensors on all ranks, not under a condition on the rank"
        return f"{who} {where}; the others {there}"
    apart = {place.function: f"rank {rank} {place}, at {place.stack[-1]}" for rank, place in places.items()}
    if len(apart) == 1:
        return f"none is behind: all ranks {there}"
    return f"ranks wait for each other, for some left a collective out: {'; '.join([*apart.values()][:MAX_RANKS])}"
