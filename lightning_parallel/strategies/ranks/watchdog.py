"""A thread that names a hang before the backend gives up: where every rank stands, and which of them is behind.

A backend ends a collective that waited longer than its timeout, and says neither which rank did not come nor where that
one is. So a rank that waited for most of that time says so in the store, and all ranks leave their places there.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_parallel.collectives.functional import Unanswered, answer_of, notes_under
from lightning_parallel.strategies.ranks.failures import SHOWN, named
from lightning_parallel.strategies.ranks.frames import frames_of
from lightning_parallel.strategies.ranks.tracebacks import LIBRARIES, PACKAGE

SHARE = 0.7
"""Of the timeout: a rank that stood so long asks where the others are. The rest is for them to answer."""
LOOKS, SECONDS = 30, (0.1, 15.0)
"""How often a rank is looked at within a timeout, and the least and most seconds between two looks."""
WAITING = (str(PACKAGE), str(Path(str(dist.__file__)).parent))


class Place(NamedTuple):
    """Where a rank stands.

    Attributes:
        waits: whether it is in a collective, as far as Python sees, and not in code of the user's or a library's.
        step: of the optimizer.
        function: the collective, or else the innermost function, with its line.
        stack: lines of the script that led there, outermost first.
        begun: the collectives that it has begun in each group.
        seconds: for how long it has stood there.
    """

    waits: bool
    step: int
    function: str
    stack: list[str]
    begun: Mapping[str, int]
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.doing} for {self.seconds:.0f} s, at {' < '.join(self.stack[:-5:-1])}"

    @property
    def doing(self) -> str:
        """What it does, and in which step."""
        return f"{'waits' if self.waits else 'is'} in {self.function} of step {self.step}"


class Watchdog:
    """Looks at the thread that made it, from one of its own, until it is stopped.

    | what is seen at a look                                       | what the rank does                             |
    |--------------------------------------------------------------|------------------------------------------------|
    | it stands at one place for `SHARE` of the timeout            | asks all, which is the next round; then answers|
    | some rank asked                                              | leaves its place in the store, reads all       |
    | some are behind, for which others stood that long            | tells their places and its own; looks no more  |
    | all do the same, or nobody waits                             | goes on looking; the next to ask begins a round|

    Args:
        rank: this one.
        ranks: how many there are.
        timeout: of collectives.
        step: the number of the optimizer's step.
        begun: the collectives that this rank has begun in each of its groups.
    """

    def __init__(
        self, rank: int, ranks: int, timeout: timedelta, step: Callable[[], int], begun: Callable[[], Mapping[str, int]]
    ) -> None:
        self._rank, self._ranks, self._step, self._begun = rank, ranks, step, begun
        self._patience = SHARE * timeout.total_seconds()
        self._answering = min(0.2 * timeout.total_seconds(), 60.0) + 2.0  # seconds; all but silent ranks answer at once
        self._period = min(max(timeout.total_seconds() / LOOKS, SECONDS[0]), SECONDS[1])
        notes = notes_under("lightning_parallel_watchdog")
        self._notes = notes_under(f"run_{notes.add(f'runs_of_{rank}', 1)}", notes)
        self._watched, self._stopped = threading.get_ident(), threading.Event()
        #: what was told of a hang
        self.told = ""
        self._line, self._stood = "", (0, begun())
        self._thread = threading.Thread(target=self._watch, name="lightning_parallel watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> str:
        """Ends the thread, once it has told what it may be about to tell; what that was."""
        self._stopped.set()
        self._thread.join(timeout=self._answering)
        return self.told

    def last_words(self) -> str:
        """Of a hang that was told and goes on: in one line, who is behind. Empty where this rank has gone on since."""
        self.stop()
        return self._line if self._line and self._stood == (self._step(), self._begun()) else ""

    def _watch(self) -> None:
        place, since, number = self._place(), time.monotonic(), 0
        try:
            while not self._stopped.wait(self._period) and not self.told:
                now = self._place()
                if now != place:
                    place, since = now, time.monotonic()
                seconds = time.monotonic() - since
                round_ = notes_under(f"round_{number}", self._notes)
                if answer_of(partial(_is_asked, round_, seconds > self._patience), self._answering):
                    self.told = self._tell(self._answers(round_, place._replace(seconds=seconds)))
                    since, number = time.monotonic(), number + 1
        except Unanswered as error:
            self.told = self._say(f"ranks wait; {error}", str(error), place)
        except RuntimeError:  # that process has ended, and the run with it
            return

    def _place(self) -> Place:
        frames = frames_of(self._watched)
        own = [frame for frame in frames if not frame.file.startswith(LIBRARIES)] or frames[:1]
        stack = [f"{frame.file}:{frame.line} in {frame.function}" for frame in own]
        waits = frames[-1].file.startswith(WAITING)
        collectives = [frame for frame in frames if frame.file.endswith("distributed_c10d.py")]
        shown = (collectives if waits and collectives else frames)[-1]
        function = f"{shown.function} ({Path(shown.file).name}:{shown.line})"
        return Place(waits, self._step(), function, stack, self._begun())

    def _answers(self, round_: Any, place: Place) -> dict[int, Place]:
        keys = [str(rank) for rank in range(self._ranks)]
        round_.set(keys[self._rank], json.dumps(place))
        deadline = time.monotonic() + self._answering
        while time.monotonic() < deadline and not round_.check(keys):
            time.sleep(0.05)
        return {rank: Place(*json.loads(round_.get(key))) for rank, key in enumerate(keys) if round_.check([key])}

    def _tell(self, places: Mapping[int, Place]) -> str:
        behind = ranks_behind(places, self._ranks)
        waiting = [place for rank, place in places.items() if rank not in behind and (behind or place.waits)]
        if not any(place.seconds > 0.9 * self._patience for place in waiting):
            return ""
        many = f" and {len(behind) - SHOWN} more" if len(behind) > SHOWN else ""
        shown = f"behind: {', '.join(map(str, behind[:SHOWN]))}{many}" if behind else "none is behind the others"
        listed = sorted({*(behind or places)} - {self._rank})[:SHOWN]
        lines = [f"rank {rank} {places.get(rank, 'says nothing: it is stopped, or has ended')}" for rank in listed]
        mine = f"rank {self._rank} {places[self._rank]}"
        told = "\n  ".join([f"ranks wait, and not all have come; {shown}", *lines, mine])
        return self._say(told, in_one_line(places, behind), places[self._rank])

    def _say(self, told: str, line: str, place: Place) -> str:
        print(f"[rank{self._rank}] {told}", file=sys.stderr, flush=True)
        self._line, self._stood = line, (place.step, place.begun)
        return told


def _is_asked(round_: Any, asks: bool) -> bool:
    if asks:
        round_.set("asked", "")
    return bool(round_.check(["asked"]))


def ranks_behind(places: Mapping[int, Place], ranks: int) -> list[int]:
    """Ranks that say nothing; else those that have begun fewer collectives than others, or do not wait as others do.

    Where each rank has begun fewer in some group, some left a collective out and went on to the next: the fewer ones.
    """
    if silent := [rank for rank in range(ranks) if rank not in places]:
        return silent
    most: dict[str, int] = {}
    for place in places.values():
        most |= {group: max(n, most.get(group, 0)) for group, n in place.begun.items()}
    late_in = {rank: {g for g, n in place.begun.items() if n < most[g]} for rank, place in places.items()}
    late = [rank for rank, groups in late_in.items() if groups]
    busy = [rank for rank, place in places.items() if not place.waits]
    found = [rank for rank in late if rank in busy] or late or busy
    if len(found) < ranks:
        return found
    return _fewest(late_in) if late else []


def _fewest(late_in: Mapping[int, set[str]]) -> list[int]:
    """The ranks that are late in other groups than most are; none where that are half of them."""
    alike: dict[frozenset[str], list[int]] = {}
    for rank, groups in late_in.items():
        alike.setdefault(frozenset(groups), []).append(rank)
    first, *others = sorted(alike.values(), key=len)
    return first if others and len(first) < len(others[0]) else []


def in_one_line(places: Mapping[int, Place], behind: Sequence[int]) -> str:
    """Who is behind, and where the first of them is; where the others wait."""
    others = [place for rank, place in places.items() if rank not in behind]
    longest = max(others, key=lambda place: (place.waits, place.seconds))
    there = f"wait in {longest.function} of step {longest.step}"
    if behind:
        where = _where(places[behind[0]]) if behind[0] in places else "says nothing: it is stopped, or has ended"
        subject = f"are behind: rank {behind[0]}" if behind[1:] else "is behind: it"
        if behind[0] in places and places[behind[0]].waits:  # they wait in unlike collectives: either may be too many
            there += f", at {longest.stack[-1]}; read tensors on all ranks, not under a condition on the rank"
        return f"{named(behind)} {subject} {where}; the others {there}"
    apart = {place.function: f"rank {rank} {_where(place)}" for rank, place in places.items()}
    if len(apart) == 1:
        return f"none is behind: all ranks {there}"
    return f"ranks wait for each other, for some left a collective out: {'; '.join([*apart.values()][:SHOWN])}"


def _where(place: Place) -> str:
    return f"{place.doing}, at {place.stack[-1]}"
