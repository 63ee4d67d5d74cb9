"""Report a hang before the backend's timeout: which rank is behind, and at which line of the user's code it is.

A backend aborts a collective after its timeout, and reports neither which rank is missing nor where that rank is. So a
rank that has not moved for 0.7 of the timeout asks all others through the store of the process group, and all ranks
write their positions there.
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

from lightning_parallel.collectives.functional import StoreTimeout, call_with_timeout, prefix_store
from lightning_parallel.strategies.lightning_package import Trainer, lightning, lightning_fabric

PATIENCE = 0.7
"""Fraction of the timeout after which a rank that has not moved asks all ranks; the rest is left for their answers."""
POLLS, POLL_SECONDS = 30, (0.1, 15.0)
"""Number of polls within a timeout, and the least and most seconds between two polls."""
MAX_RANKS = 8
PACKAGE = Path(__file__).parents[2]
LIBRARIES = (
    *(f"{Path(str(module.__file__)).parent}{os.sep}" for module in (lightning, lightning_fabric, torch)),
    f"{PACKAGE}{os.sep}",
    contextlib.__file__,
)
WAITING = (str(PACKAGE), str(Path(str(dist.__file__)).parent))
SILENT = "does not answer: it is stopped, or has ended"


class RankPosition(NamedTuple):
    """Position of a rank in the program.

    Attributes:
        waits: whether it is inside a collective; if not, it runs code of the user or a library.
        step: `trainer.global_step`.
        function: the collective, or else the innermost function, with its file and line.
        stack: lines of the user's script that led there, outermost first.
        begun: number of collectives that it has begun, by group name.
        seconds: how long it has been there.
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
    """Thread that polls the position of the thread that created it, until it is stopped or has reported a hang.

    At each poll:
        - If this rank has been at one place for 0.7 of the timeout, it asks all ranks.
        - If any rank has asked, each rank writes its place to the store and reads the places of all others.
        - If ranks have waited that long for others, it reports the others' places and its own. Else it keeps polling.

    Args:
        rank: this rank.
        ranks: number of ranks.
        timeout: timeout of collectives.
        trainer: provides the number of the current step.
        begun: returns the number of collectives that this rank has begun, by group name.

    Attributes:
        report: text about a hang: first line which ranks are behind, then the places of some ranks; "" without a hang.
    """

    def __init__(
        self, rank: int, ranks: int, timeout: timedelta, trainer: Trainer, begun: Callable[[], Mapping[str, int]]
    ) -> None:
        self._rank, self._ranks, self._trainer, self._begun = rank, ranks, trainer, begun
        seconds = timeout.total_seconds()
        self._patience = PATIENCE * seconds
        self._answering = min(0.2 * seconds, 60.0) + 2.0  # seconds; a rank answers at its next poll, or never
        self._period = min(max(seconds / POLLS, POLL_SECONDS[0]), POLL_SECONDS[1])
        notes = prefix_store("lightning_parallel_watchdog")
        self._notes = prefix_store(f"run_{notes.add(f'runs_of_{rank}', 1)}", notes)
        self._watched, self._stopped = threading.get_ident(), threading.Event()
        self.report = ""
        self._reported_at: tuple[int, Mapping[str, int]] = (0, {})
        self._thread = threading.Thread(target=self._watch, name="lightning_parallel watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> str:
        """End the thread after it has finished a report that it is writing; return the report."""
        self._stopped.set()
        self._thread.join(timeout=self._answering)
        return self.report

    def hang_summary(self) -> str:
        """Return which rank is behind, in one line, if the reported hang goes on; "" if this rank has moved since."""
        self.stop()
        return self.report.partition("\n")[0] if self._reported_at == (self._trainer.global_step, self._begun()) else ""

    def _watch(self) -> None:
        place, since, number = self._place(), time.monotonic(), 0
        try:
            while not self._stopped.wait(self._period) and not self.report:
                if (now := self._place()) != place:
                    place, since = now, time.monotonic()
                seconds, round_ = time.monotonic() - since, prefix_store(f"round_{number}", self._notes)

                def is_asked(asks: bool = seconds > self._patience, round_: Any = round_) -> bool:
                    if asks:
                        round_.set("asked", "")
                    return bool(round_.check(["asked"]))

                # if any rank has asked, every rank answers, whether it hangs or not
                if call_with_timeout(self._answering, is_asked):
                    self._tell(round_, place._replace(seconds=seconds))
                    since, number = time.monotonic(), number + 1
        except StoreTimeout as error:
            self._print(f"ranks wait; {error}", place)
        except RuntimeError:  # the process that serves the store has ended, and so does the run
            return

    def _place(self) -> RankPosition:
        # `faulthandler` writes file, line and function of the innermost 100 frames of each thread in one go. Frames of
        # `sys._current_frames` may be freed while they are read, because the thread goes on: Python 3.11 then read
        # memory of other objects.
        in_memory = sys.platform == "linux"  # the disk may be full or unmounted
        with open(os.memfd_create("frames"), "w+") if in_memory else tempfile.TemporaryFile("w+") as dump:
            faulthandler.dump_traceback(dump, all_threads=True)
            dump.seek(0)
            section = re.search(rf"hread 0x0*{self._watched:x} .*\n((?:  .*\n)*)", dump.read())
        lines = re.findall(r'  File "(.*)", line (\d+) in (.*)', section[1] if section else "")
        # outermost first
        frames = [(path, int(at), name) for path, at, name in lines[::-1]] or [("an unknown place", 0, "unknown code")]
        users = [frame for frame in frames if not frame[0].startswith(LIBRARIES)] or frames[:1]
        waits = frames[-1][0].startswith(WAITING)
        collectives = [frame for frame in frames if frame[0].endswith("distributed_c10d.py")]
        file, line, function = (collectives if waits and collectives else frames)[-1]
        stack = [f"{path}:{number} in {name}" for path, number, name in users]
        return RankPosition(
            waits, self._trainer.global_step, f"{function} ({Path(file).name}:{line})", stack, self._begun()
        )

    def _tell(self, round_: Any, place: RankPosition) -> None:
        """Write this rank's place, read the places of all ranks, and report a hang if ranks have waited long enough."""
        keys = [str(rank) for rank in range(self._ranks)]
        round_.set(keys[self._rank], json.dumps(place))
        deadline = time.monotonic() + self._answering
        while time.monotonic() < deadline and not round_.check(keys):
            time.sleep(0.05)
        places = {
            rank: RankPosition(*json.loads(round_.get(key))) for rank, key in enumerate(keys) if round_.check([key])
        }
        behind = ranks_behind(places, self._ranks)
        waiting = [place for rank, place in places.items() if rank not in behind and (behind or place.waits)]
        if not any(place.seconds > 0.9 * self._patience for place in waiting):
            return
        lines = [summary(places, behind)]
        for rank in [*sorted({*(behind or places)} - {self._rank})[:MAX_RANKS], self._rank]:
            position, where = places.get(rank), SILENT
            if position is not None:
                where = f"{position} for {position.seconds:.0f} s, at {' < '.join(position.stack[:-5:-1])}"
            lines.append(f"rank {rank} {where}")
        self._print("\n  ".join(lines), places[self._rank])

    def _print(self, report: str, place: RankPosition) -> None:
        print(f"[rank{self._rank}] {report}", file=sys.stderr, flush=True)
        self._reported_at, self.report = (place.step, place.begun), report


def ranks_behind(places: Mapping[int, RankPosition], ranks: int) -> list[int]:
    """Return the ranks for which others wait.

    These are silent ranks, if there are any; else ranks that have begun fewer collectives than others, of these first
    the ranks that do not wait; else all ranks that do not wait. If every rank has begun fewer collectives in some
    group, some ranks have skipped a collective: the ranks that are late in other groups than most; none in a tie.
    """
    if silent := [rank for rank in range(ranks) if rank not in places]:
        return silent
    most: dict[str, int] = {}
    for place in places.values():
        most |= {group: max(n, most.get(group, 0)) for group, n in place.begun.items()}
    late_in = {rank: frozenset(g for g, n in place.begun.items() if n < most[g]) for rank, place in places.items()}
    late = [rank for rank, groups in late_in.items() if groups]
    busy = [rank for rank, place in places.items() if not place.waits]
    behind = [rank for rank in late if rank in busy] or late or busy
    if len(behind) < ranks:
        return behind
    common = Counter(late_in.values()).most_common()
    if len(common) == 1 or common[-1][1] == common[-2][1]:
        return []
    return [rank for rank, groups in late_in.items() if groups == common[-1][0]]


def summary(places: Mapping[int, RankPosition], behind: Sequence[int]) -> str:
    """Describe in one line which ranks are behind, where the first of them is, and where the others wait."""
    others = [place for rank, place in places.items() if rank not in behind]
    longest = max(others, key=attrgetter("waits", "seconds"))
    waiting = f"wait in {longest.function} of step {longest.step}"
    if behind:
        first = places.get(behind[0])
        where = SILENT if first is None else f"{first}, at {first.stack[-1]}"
        more = f" and {len(behind) - MAX_RANKS} more" if len(behind) > MAX_RANKS else ""
        ranks = ", ".join(map(str, behind[:MAX_RANKS])) + more
        who = f"ranks {ranks} are behind: rank {behind[0]}" if behind[1:] else f"rank {ranks} is behind: it"
        if first is not None and first.waits:  # ranks wait in different collectives: either one may be superfluous
            waiting += f", at {longest.stack[-1]}; read tensors on all ranks, not under a condition on the rank"
        return f"{who} {where}; the others {waiting}"
    waits = {place.function: f"rank {rank} {place}, at {place.stack[-1]}" for rank, place in places.items()}
    if len(waits) == 1:
        return f"none is behind: all ranks {waiting}"
    return f"ranks wait for each other, as some skipped a collective: {'; '.join([*waits.values()][:MAX_RANKS])}"
