"""Schedules of a pipeline as data: which rank computes which stage on which microbatch, and in which order.

>>> print(make_schedule("1f1b", ranks=2, microbatches=3).grid())
rank 0 | 0F0 0F1     0B0 0F2 0B1     0B2
rank 1 |     1F0 1B0 1F1 1B1 1F2 1B2
"""

import csv
import difflib
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lightning_parallel.techniques.pipeline_parallel.schedule import orders
from lightning_parallel.techniques.pipeline_parallel.schedule.actions import Action, ActionKind, Orders, parse, run
from lightning_parallel.techniques.pipeline_parallel.schedule.communication import with_communication

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Rule",
    "Schedule",
    "check_stages_per_rank",
    "file_sizes",
    "is_file",
    "make_schedule",
    "nearest_legal_microbatches",
]


@dataclass(frozen=True)
class Schedule:
    """The work of all ranks of one pipeline for one batch.

    Args:
        name: Name of the schedule, or the path of its CSV file.
        ranks: Ranks of the pipeline.
        stages: Stages over all ranks.
        microbatches: Microbatches of a batch.
        orders: Per rank its computations in order; None is an idle slot of the grid, in which every action takes one.
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    orders: tuple[tuple[Action | None, ...], ...]

    @cached_property
    def computations(self) -> tuple[tuple[Action, ...], ...]:
        """Per rank its computations in order, without idle slots."""
        return tuple(tuple(action for action in row if action is not None) for row in self.orders)

    @cached_property
    def _placement(self) -> dict[int, int]:
        return {action.stage: rank for rank, row in enumerate(self.computations) for action in row}

    def rank_of(self, stage: int) -> int:
        """The rank that holds the stage."""
        return self._placement[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that the rank holds, in the order of the model."""
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backwards are run as input gradient first, weight gradient later."""
        return any(action.kind is ActionKind.W for row in self.computations for action in row)

    def with_communication(self) -> tuple[tuple[Action, ...], ...]:
        """Per rank its computations and what it sends and receives, in an order that cannot deadlock.

        Messages are ordered alike on both sides, so that sends may wait for their receiver and a pair of ranks may
        carry messages in order only. Stages of one rank hand over without a message.
        """
        return self._with_communication

    @cached_property
    def _with_communication(self) -> tuple[tuple[Action, ...], ...]:
        return with_communication(self.computations, self.stages, self.rank_of)

    def only(self, microbatches: int) -> "Schedule":
        """The same order for fewer microbatches, as for a batch that is smaller than the others.

        Raises:
            ValueError: There are not that many, or none.
        """
        if not 1 <= microbatches <= self.microbatches:
            raise ValueError(
                f"{microbatches} microbatches are none of 1 to {self.microbatches}, which the schedule has; "
                "make another schedule for more"
            )
        kept = [[action for action in row if action.microbatch < microbatches] for row in self.computations]
        return _laid_out(self.name, self.stages, microbatches, kept)

    def with_loss_stage(self) -> "Schedule":
        """The same order with one stage more, on the rank of the last one, that needs all microbatches at once.

        So forwards come first, as in GPipe, and backwards follow in the order that they had.
        """
        loss, last = self.stages, self.rank_of(self.stages - 1)
        rows = []
        for rank, row in enumerate(self.computations):
            middle = [
                Action(loss, kind, microbatch)
                for kind in (ActionKind.F, ActionKind.B)
                for microbatch in range(self.microbatches if rank == last else 0)
            ]
            forwards = [action for action in row if action.kind is ActionKind.F]
            rows.append([*forwards, *middle, *(action for action in row if action.kind is not ActionKind.F)])
        return _laid_out(self.name, self.stages + 1, self.microbatches, rows)

    def grid(self) -> str:
        """Text of ranks over time, where every action takes one slot."""
        width = max(len(str(action)) for row in self.computations for action in row)
        head = len(str(self.ranks - 1))
        rows = (" ".join(f"{'' if cell is None else str(cell):<{width}}" for cell in row) for row in self.orders)
        return "\n".join(f"rank {rank:<{head}} | {row}".rstrip() for rank, row in enumerate(rows))

    def csv(self) -> str:
        """One row per rank, in the format that PyTorch and `make_schedule` read."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([cell or "" for cell in row] for row in self.orders)
        return text.getvalue()


def _laid_out(name: str, stages: int, microbatches: int, dense: Orders) -> Schedule:
    """The schedule whose ranks work through `dense`, each action in the first slot that is free and ready."""
    slots = run(dense, stages, cost=lambda action: 1)
    length = int(max(end for _, end in slots.values()))
    rows: list[list[Action | None]] = [[None] * length for _ in dense]
    for row, order in zip(rows, dense, strict=True):
        for action in order:
            row[int(slots[action][0])] = action
    return Schedule(name, len(dense), stages, microbatches, tuple(map(tuple, rows)))


@dataclass(frozen=True)
class Rule:
    """The requirements of a schedule, and its order.

    Args:
        order: Computations of a rank, given the rank, ranks, microbatches and stages per rank.
        stages_per_rank: How many stages a rank holds unless told otherwise.
        fixed: Whether it cannot be told otherwise.
        legal: Whether so many microbatches fit so many ranks.
        needs: That rule in words, given ranks and microbatches.
    """

    order: Callable[[int, int, int, int], list[Action]]
    stages_per_rank: int = 1
    fixed: bool = True
    legal: Callable[[int, int], bool] = lambda ranks, microbatches: True
    needs: Callable[[int, int], str] = lambda ranks, microbatches: "takes any number of microbatches"


def _rounds_fit(ranks: int, microbatches: int) -> bool:
    return microbatches % max(1, microbatches // ranks) == 0


def _rounds_need(ranks: int, microbatches: int) -> str:
    rounds = max(1, microbatches // ranks)
    return (
        f"needs rounds of equal length, at least {ranks} microbatches each: "
        f"{microbatches} cannot be divided into {rounds}"
    )


def _fills_both_ways(ranks: int, microbatches: int) -> bool:
    return microbatches >= 2 * ranks


def _filling_needs(ranks: int, microbatches: int) -> str:
    return f"needs a microbatch for each of its {2 * ranks} stages: {microbatches} are too few"


SCHEDULES: dict[str, Rule] = {
    "gpipe": Rule(orders.gpipe),
    "1f1b": Rule(orders.one_forward_one_backward),
    "interleaved_1f1b": Rule(orders.interleaved_1f1b, 2, False, _rounds_fit, _rounds_need),
    "looped_bfs": Rule(orders.looped_bfs, 2, False),
    "interleaved_zero_bubble": Rule(orders.interleaved_zero_bubble, 2, False, _rounds_fit, _rounds_need),
    "zbv": Rule(orders.zbv, 2),
    "dualpipev": Rule(orders.dualpipev, 2, True, _fills_both_ways, _filling_needs),
}


def make_schedule(name_or_csv_path: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """The schedule of a name of `SCHEDULES`, or of a CSV file with a row per rank and cells like `0F0`.

    Args:
        name_or_csv_path: Name, or path of a file that ends in `.csv`.
        ranks: Ranks of the pipeline.
        microbatches: Microbatches of a batch.
        stages_per_rank: Stages that each rank holds; None takes the schedule's own number.

    Raises:
        ValueError: The name is unknown, a number breaks the schedule's rule, or the file is no complete schedule.
    """
    for what, value in (
        ("ranks", ranks),
        ("microbatches", microbatches),
        ("stages_per_rank", 1 if stages_per_rank is None else stages_per_rank),
    ):
        if value < 1:
            raise ValueError(f"{what}={value} must be at least 1")
    check_stages_per_rank(name_or_csv_path, stages_per_rank)
    if is_file(name_or_csv_path):
        return _read(name_or_csv_path, ranks, microbatches, stages_per_rank)
    rule = _rule(name_or_csv_path)
    _check_microbatches(name_or_csv_path, ranks, microbatches)
    v = stages_per_rank or rule.stages_per_rank
    dense = [rule.order(rank, ranks, microbatches, v) for rank in range(ranks)]
    return _laid_out(name_or_csv_path, ranks * v, microbatches, dense)


def is_file(name_or_csv_path: str) -> bool:
    """Whether this is the path of a CSV file, and no name of `SCHEDULES`."""
    return isinstance(name_or_csv_path, str) and name_or_csv_path.lower().endswith(".csv")


def check_stages_per_rank(name_or_csv_path: str, stages_per_rank: int | None) -> None:
    """Raises ValueError for a schedule or file that does not exist, and for stages that the schedule does not have."""
    if is_file(name_or_csv_path):
        _rows(name_or_csv_path)
        return
    rule = _rule(name_or_csv_path)
    if rule.fixed and stages_per_rank not in (None, rule.stages_per_rank):
        raise ValueError(
            f"{name_or_csv_path} runs {_stages(rule.stages_per_rank)} per rank, not {stages_per_rank}; leave "
            f"stages_per_rank out, or take one of {[name for name, other in SCHEDULES.items() if not other.fixed]}"
        )


def _stages(number: int) -> str:
    return "1 stage" if number == 1 else f"{number} stages"


def _rule(name: str) -> Rule:
    if name not in SCHEDULES:
        near = difflib.get_close_matches(str(name).lower(), SCHEDULES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? Otherwise " if near else ""
        raise ValueError(f"{name!r} is no schedule; {hint}take one of {list(SCHEDULES)}, or the path of a .csv file")
    return SCHEDULES[name]


def _check_microbatches(name: str, ranks: int, microbatches: int) -> None:
    if not _rule(name).legal(ranks, microbatches):
        near = nearest_legal_microbatches(name, ranks, microbatches)
        raise ValueError(
            f"{name} on {ranks} ranks {_rule(name).needs(ranks, microbatches)}; "
            f"nearest {'is' if len(near) == 1 else 'are'} {' and '.join(map(str, near))}"
        )


def nearest_legal_microbatches(name: str, ranks: int, microbatches: int) -> tuple[int, ...]:
    """The number itself if the schedule takes it, else the next smaller (if there is one) and the next larger one.

    Args:
        name: A name of `SCHEDULES`.
        ranks: Ranks of the pipeline.
        microbatches: How many were wished for.
    """
    legal = _rule(name).legal
    if microbatches >= 1 and legal(ranks, microbatches):
        return (microbatches,)
    below = next((m for m in range(microbatches - 1, 0, -1) if legal(ranks, m)), None)
    above = next(m for m in range(max(1, microbatches + 1), 2 * (ranks + max(1, microbatches)) + 1) if legal(ranks, m))
    return (above,) if below is None else (below, above)


def file_sizes(path: str) -> tuple[int, int]:
    """Ranks and microbatches of a schedule in a CSV file.

    Raises:
        ValueError: There is no such file, or it holds something else.
    """
    dense = _rows(path)
    return len(dense), 1 + max((action.microbatch for row in dense for action in row), default=0)


def _read(path: str, ranks: int, microbatches: int, stages_per_rank: int | None) -> Schedule:
    dense = _rows(path)
    try:
        _check_complete(dense, ranks, microbatches, stages_per_rank)
        return _laid_out(path, 1 + max(action.stage for row in dense for action in row), microbatches, dense)
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from problem


def _rows(path: str) -> list[list[Action]]:
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"there is no file {path}; give the path of a .csv file, or one of {list(SCHEDULES)}")
    dense: list[list[Action]] = []
    text = file.read_bytes().decode(errors="replace")
    for number, row in enumerate(csv.reader(io.StringIO(text, newline="")), 1):
        try:
            dense.append([action for cell in row for action in parse(cell)])
        except ValueError as problem:
            raise ValueError(f"{path}: row {number}: {problem}") from problem
    if not any(dense):
        raise ValueError(f"{path}: it holds no actions; write a row per rank with cells like 0F0")
    return dense


def _check_complete(dense: Orders, ranks: int, microbatches: int, stages_per_rank: int | None) -> None:
    """Raises unless every stage lies on one rank and runs every microbatch once, forward and backward."""
    if len(dense) != ranks or not all(dense):
        raise ValueError(
            f"it has {sum(map(bool, dense))} rows with actions, but the pipeline has {ranks} ranks; "
            "write one row per rank"
        )
    actions = [action for row in dense for action in row]
    _check_once(actions)
    stages = sorted({action.stage for action in actions})
    _check_stages(dense, stages, stages_per_rank)
    found = {action.microbatch for action in actions}
    if found != set(range(microbatches)):
        raise ValueError(
            f"it runs microbatches {sorted(found)}, but the batch has {microbatches}, 0 to {microbatches - 1}; "
            "change the number of microbatches, or the file"
        )
    _check_every(stages, microbatches, set(actions))


def _check_once(actions: Iterable[Action]) -> None:
    seen: set[Action] = set()
    for action in actions:
        if action in seen:
            raise ValueError(f"{action} stands in it twice; every action runs once")
        seen.add(action)


def _check_stages(dense: Orders, stages: list[int], stages_per_rank: int | None) -> None:
    if stages != list(range(len(stages))):
        raise ValueError(f"its stages are {stages}; number them 0 to {len(stages) - 1}, without a gap")
    home: dict[int, int] = {}
    for rank, row in enumerate(dense):
        for action in row:
            if home.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"stage {action.stage} runs on ranks {home[action.stage]} and {rank}; a stage lies on one rank"
                )
    counts = [sum(1 for rank in home.values() if rank == this) for this in range(len(dense))]
    if stages_per_rank is not None and set(counts) != {stages_per_rank}:
        raise ValueError(
            f"its ranks hold {counts} stages, but stages_per_rank is {stages_per_rank}; leave stages_per_rank out"
        )


def _check_every(stages: Iterable[int], microbatches: int, actions: set[Action]) -> None:
    rule = "every stage runs F, and B or else I and W, of every microbatch"
    for stage in stages:
        for i in range(microbatches):
            kinds = "".join(kind for kind in "FBIW" if Action(stage, ActionKind(kind), i) in actions)
            if kinds not in ("FB", "FIW"):
                raise ValueError(f"stage {stage} runs {' '.join(kinds) or 'nothing'} of microbatch {i}; {rule}")
