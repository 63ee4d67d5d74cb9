"""Pipeline schedules as data: which rank computes which stage on which microbatch, and in which order.

>>> print(make_schedule("1f1b", ranks=2, microbatches=3).grid())
rank 0 | 0F0 0F1     0B0 0F2 0B1     0B2
rank 1 |     1F0 1B0 1F1 1B1 1F2 1B2
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path

from lightning_parallel.techniques.pipeline_parallel.schedule import orders
from lightning_parallel.techniques.pipeline_parallel.schedule.actions import MESSAGES, Action, ActionKind, action_times


@dataclass(frozen=True)
class Schedule:
    """The computations of all ranks of a pipeline for one batch: `computations[rank]` are those of a rank, in order."""

    name: str
    stages: int
    microbatches: int
    computations: tuple[tuple[Action, ...], ...]
    _shortened: dict[int, Schedule] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return len(self.computations)

    @cached_property
    def rank_of(self) -> Callable[[int], int]:
        """Function from a stage to the rank that holds it."""
        return {action.stage: rank for rank, row in enumerate(self.computations) for action in row}.__getitem__

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that the rank holds, in the order of the model."""
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    @cached_property
    def splits_backward(self) -> bool:
        """True if some backwards compute the input gradients first (I) and the weight gradients later (W)."""
        return any(action.kind is ActionKind.W for row in self.computations for action in row)

    @cached_property
    def with_communication(self) -> tuple[tuple[Action, ...], ...]:
        """Computations, sends and receives of each rank, in an order that cannot deadlock.

        There is one global order of all messages: by the time at which they are ready if a backward takes as long as
        two forwards. Each rank starts its sends and receives in that order, and starts a computation before the
        messages that are ready later. So the first undelivered message is always the next one of both its ranks, and
        ranks cannot wait in a cycle, even if every send blocks until it is received and a pair of ranks carries only
        one message at a time.
        """
        computed, rank_of = self.computations, self.rank_of
        times = action_times(computed, self.stages, cost=lambda action: 2 if action.kind is ActionKind.B else 1)
        rows: list[list[tuple[float, int, int, Action]]] = [
            [(times[action][0], 1, number, action) for number, action in enumerate(order)] for order in computed
        ]
        ends = [(times[action][1], action) for order in computed for action in order if action.kind in MESSAGES]
        for number, (end, (stage, kind, microbatch)) in enumerate(sorted(ends, key=itemgetter(0))):
            send, receive, stage_offset = MESSAGES[kind]
            receiver = stage + stage_offset
            if 0 <= receiver < self.stages and rank_of(receiver) != rank_of(stage):
                rows[rank_of(stage)].append((end, 0, number, Action(stage, send, microbatch)))
                rows[rank_of(receiver)].append((end, 0, number, Action(receiver, receive, microbatch)))
        return tuple(tuple(entry[-1] for entry in sorted(row, key=itemgetter(0, 1, 2))) for row in rows)

    def only(self, microbatches: int) -> Schedule:
        """Return the same order for fewer microbatches, e.g. for a last batch with fewer samples. Cached."""
        if microbatches not in self._shortened:
            rows = (tuple(action for action in row if action.microbatch < microbatches) for row in self.computations)
            self._shortened[microbatches] = Schedule(self.name, self.stages, microbatches, tuple(rows))
        return self._shortened[microbatches]

    def with_loss_stage(self) -> Schedule:
        """Return the order with one more stage, on the rank of the last one, for the loss of all microbatches together.

        That stage needs all microbatches at once, so all forwards come first, as in GPipe; backwards keep their order.
        """
        kinds, rows = (ActionKind.F, ActionKind.B), []
        loss = [Action(self.stages, kind, microbatch) for kind in kinds for microbatch in range(self.microbatches)]
        for rank, row in enumerate(self.computations):
            middle = loss if rank == self.rank_of(self.stages - 1) else ()
            forwards, backwards = [a for a in row if a.kind is kinds[0]], [a for a in row if a.kind is not kinds[0]]
            rows.append((*forwards, *middle, *backwards))
        return Schedule(self.name, self.stages + 1, self.microbatches, tuple(rows))

    def _slots(self) -> list[list[str]]:
        """Return a table `[rank][time]` of texts such as "0F0", if every action takes one slot; idle slots are ""."""
        times = action_times(self.computations, self.stages)
        cells = [[""] * int(max(end for _, end in times.values())) for _ in self.computations]
        for rank, row in enumerate(self.computations):
            for action in row:
                cells[rank][int(times[action][0])] = str(action)
        return cells

    def grid(self) -> str:
        """Return the schedule as text: one line per rank, one column per slot of time; see the module's example."""
        rows = self._slots()
        width = max(len(cell) for row in rows for cell in row)
        head = len(str(self.ranks - 1))
        texts = (" ".join(f"{cell:<{width}}" for cell in row) for row in rows)
        return "\n".join(f"rank {rank:<{head}} | {text}".rstrip() for rank, text in enumerate(texts))

    def csv(self) -> str:
        """Return the schedule as CSV, one row per rank, in the format that PyTorch and `make_schedule` read."""
        return "".join(",".join(row) + "\n" for row in self._slots())


@dataclass(frozen=True)
class Rule:
    """How to make a schedule, and which sizes it accepts."""

    # (rank, number of ranks, microbatches, stages per rank) -> computations of this rank
    order: Callable[[int, int, int, int], list[Action]]
    stages_per_rank: int = 1  # default number of stages of each rank
    fixed: bool = True  # whether `stages_per_rank` is the only number of stages that ranks can hold
    # whether microbatches run in rounds of equal length: on 4 ranks, 8 (2 x 4) or 10 (2 x 5), but not 9
    in_rounds: bool = False


SCHEDULES = {
    "gpipe": Rule(orders.gpipe),
    "1f1b": Rule(orders.one_forward_one_backward),
    "interleaved_1f1b": Rule(orders.interleaved_1f1b, 2, fixed=False, in_rounds=True),
    "looped_bfs": Rule(orders.looped_bfs, 2, fixed=False),
    "interleaved_zero_bubble": Rule(orders.interleaved_zero_bubble, 2, fixed=False, in_rounds=True),
    "zbv": Rule(orders.zbv, 2),
}


def make_schedule(name_or_csv_path: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """Make the schedule with a name in `SCHEDULES`, or read it from a file that ends in `.csv`.

    `stages_per_rank=None` takes the default of the schedule.

    Raises:
        ValueError: The name is unknown, the schedule does not support one of the numbers, or the file is no complete
            schedule.
    """
    name, sizes = name_or_csv_path, {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    for what, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{what}={value} must be at least 1")
    check_stages_per_rank(name, stages_per_rank)
    if is_file(name):
        schedule = read_csv(name)
        if (schedule.ranks, schedule.microbatches) != (ranks, microbatches):
            raise ValueError(
                f"{name} has {schedule.ranks} ranks (one per row) and {schedule.microbatches} microbatches, but the "
                f"pipeline has {ranks} ranks and {microbatches} microbatches; change the pipeline or the file"
            )
        return schedule
    near = nearest_legal_microbatches(name, ranks, microbatches)
    if near != (microbatches,):
        raise ValueError(
            f"{name} on {ranks} ranks needs rounds of equal length, at least {ranks} microbatches each: {microbatches} "
            f"cannot be divided into {microbatches // ranks}; nearest are {' and '.join(map(str, near))}"
        )
    v = stages_per_rank or SCHEDULES[name].stages_per_rank
    rows = (tuple(SCHEDULES[name].order(rank, ranks, microbatches, v)) for rank in range(ranks))
    return Schedule(name, ranks * v, microbatches, tuple(rows))


def is_file(name_or_csv_path: str) -> bool:
    """Return True for the path of a CSV file, False for a name in `SCHEDULES`."""
    return isinstance(name_or_csv_path, str) and name_or_csv_path.lower().endswith(".csv")


def check_stages_per_rank(name: str, stages_per_rank: int | None) -> None:
    """Raise ValueError if the schedule or file does not exist, or does not support this number of stages per rank."""
    if is_file(name):
        schedule = read_csv(name)
        stage_counts = [len(schedule.stages_of(rank)) for rank in range(schedule.ranks)]
        if stages_per_rank is not None and set(stage_counts) != {stages_per_rank}:
            raise ValueError(
                f"{name}: its ranks hold {stage_counts} stages, but stages_per_rank is {stages_per_rank}; leave it out"
            )
        return
    if name not in SCHEDULES:
        near = difflib.get_close_matches(str(name).lower(), SCHEDULES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? Otherwise " if near else ""
        raise ValueError(f"{name!r} is no schedule; {hint}take one of {list(SCHEDULES)}, or the path of a .csv file")
    v = SCHEDULES[name].stages_per_rank
    if SCHEDULES[name].fixed and stages_per_rank not in (None, v):
        raise ValueError(
            f"{name} runs {v} {'stage' if v == 1 else 'stages'} per rank, not {stages_per_rank}; leave stages_per_rank "
            f"out, or take one of {[other for other, rule in SCHEDULES.items() if not rule.fixed]}"
        )


def nearest_legal_microbatches(name: str, ranks: int, microbatches: int) -> tuple[int, ...]:
    """Return `(microbatches,)` if the schedule accepts it, else the next smaller (if any) and next larger number."""
    in_rounds = SCHEDULES[name].in_rounds
    legal = [m for m in range(1, max(1, microbatches) + ranks) if not in_rounds or m % max(1, m // ranks) == 0]
    below, above = [m for m in legal if m <= microbatches], [m for m in legal if m >= microbatches]
    return tuple(sorted({*below[-1:], *above[:1]}))


def read_csv(path: str) -> Schedule:
    """Read a schedule from a file with one row per rank and cells like `0F0`; empty cells are ignored.

    Raises:
        ValueError: The file does not exist, a cell is no action, or the file is no complete schedule.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}; give the path of a .csv file, or one of {list(SCHEDULES)}")
    text = Path(path).read_bytes().decode(errors="replace")
    rows: list[tuple[Action, ...]] = []
    for number, cells in enumerate(csv.reader(text.splitlines()), 1):
        row = []
        for column, cell in enumerate(map(str.strip, cells), 1):
            if match := re.fullmatch(r"(\d+)([FBIW])(\d+)", cell):
                row.append(Action(int(match[1]), ActionKind(match[2]), int(match[3])))
            elif cell:
                where = f"{path}: row {number}, column {column}"
                raise ValueError(f"{where}: {cell!r} is no action; write one action per cell, e.g. 2F0")
        rows.append(tuple(row))
    if not rows or not all(rows):
        counts = f"{sum(map(bool, rows))} of its {len(rows)} rows have actions"
        raise ValueError(f"{path}: {counts}; write a row per rank with cells like 0F0")
    actions = [action for row in rows for action in row]
    stages, microbatches = 1 + max(a.stage for a in actions), 1 + max(a.microbatch for a in actions)
    try:
        action_times(rows, stages)
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from problem
    return Schedule(path, stages, microbatches, tuple(rows))
