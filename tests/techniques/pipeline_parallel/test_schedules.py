"""Schedules as data: PyTorch's orders, complete, free of deadlock, with the bubbles of the literature; the command."""

import random
import re
import runpy
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as theirs

from lightning_parallel.schedule import main
from lightning_parallel.techniques.pipeline_parallel.balance import balance_stages
from lightning_parallel.techniques.pipeline_parallel.schedule.actions import Action, ActionKind
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import (
    SCHEDULES,
    Schedule,
    make_schedule,
    nearest_legal_microbatches,
)
from lightning_parallel.techniques.pipeline_parallel.schedule.simulate import simulate

DOCS = Path(__file__).parents[3] / "docs"
RANKS = (1, 2, 3, 4, 8)
MICROBATCHES = (1, 4, 9)
FROM_TORCH = {
    "interleaved_1f1b": theirs.ScheduleInterleaved1F1B,
    "looped_bfs": theirs.ScheduleLoopedBFS,
    "interleaved_zero_bubble": theirs.ScheduleInterleavedZeroBubble,
    "zbv": theirs.ScheduleZBVZeroBubble,
}


@cache
def schedules_of(name: str) -> tuple[Schedule, ...]:
    return tuple(make_schedules(name))


def make_schedules(name: str) -> Iterator[Schedule]:
    """Every legal combination of few and many ranks, microbatches and stages per rank."""
    rule = SCHEDULES[name]
    for ranks in RANKS:
        for microbatches in {m for wish in MICROBATCHES for m in nearest_legal_microbatches(name, ranks, wish)}:
            for stages_per_rank in (None,) if rule.fixed else (1, 2, 3):
                yield make_schedule(name, ranks, microbatches, stages_per_rank)


def peer(schedule: Schedule, action: Action) -> tuple[int, Action] | None:
    """The rank at the other end of a SEND or RECV, and what it calls the message."""
    if action.kind.value in "FBIW":
        return None
    forward, sends = action.kind.value.endswith("_F"), action.kind.value.startswith("SEND")
    stage = action.stage + (1 if forward == sends else -1)
    kind = ActionKind[action.kind.value.replace("SEND", "RECV") if sends else action.kind.value.replace("RECV", "SEND")]
    return schedule.rank_of(stage), Action(stage, kind, action.microbatch)


class Machine:
    """Ranks that work through their lists; a computation without its inputs on the rank is an error.

    A send waits until the receiver stands at the same message: whatever ends so ends with sends that do not wait too.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.lists = [deque(row) for row in schedule.with_communication]
        self.done: list[set[Action]] = [set() for _ in self.lists]

    def run(self) -> None:
        while any(self.advance(rank) for rank in range(len(self.lists))):
            pass
        waiting = {rank: row[0] for rank, row in enumerate(self.lists) if row}
        assert not waiting, f"{self.schedule.name} hangs: {waiting}"

    def advance(self, rank: int) -> bool:
        if not self.lists[rank] or not self.may(rank, self.lists[rank][0]):
            return False
        self.finish(rank)
        return True

    def finish(self, rank: int) -> None:
        self.done[rank].add(self.lists[rank].popleft())

    def may(self, rank: int, action: Action) -> bool:
        other = peer(self.schedule, action)
        if other is None:
            self.check_inputs(rank, action)
            return True
        there, message = other
        assert there != rank, f"{action} stays on rank {rank}"
        if action.kind.value.startswith("SEND"):
            self.check_sent(rank, action)
        return self.meets(there, message)

    def meets(self, there: int, message: Action) -> bool:
        """Both sides stand at the same message; the other side is finished here, this one by the caller."""
        if not self.lists[there] or self.lists[there][0] != message:
            return False
        self.finish(there)
        return True

    def check_sent(self, rank: int, action: Action) -> None:
        kinds = (ActionKind.F,) if action.kind is ActionKind.SEND_F else (ActionKind.B, ActionKind.I)
        assert any(Action(action.stage, kind, action.microbatch) in self.done[rank] for kind in kinds)

    def check_inputs(self, rank: int, action: Action) -> None:
        stage, kind, i = action.stage, action.kind, action.microbatch
        wanted: list[set[Action]] = []
        if kind is ActionKind.W:
            wanted = [{Action(stage, ActionKind.I, i)}]
        elif kind is ActionKind.F and stage:
            wanted = [{Action(stage, ActionKind.RECV_F, i), Action(stage - 1, ActionKind.F, i)}]
        elif kind is not ActionKind.F:
            after = {
                Action(stage, ActionKind.RECV_B, i),
                Action(stage + 1, ActionKind.B, i),
                Action(stage + 1, ActionKind.I, i),
            }
            wanted = [{Action(stage, ActionKind.F, i)}, *([after] if stage < self.schedule.stages - 1 else [])]
        for choices in wanted:
            assert choices & self.done[rank], f"{action} on rank {rank} lacks {choices}"


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_complete_and_free_of_deadlock(name: str) -> None:
    for schedule in schedules_of(name):
        Machine(schedule).run()
        Machine(schedule.only((schedule.microbatches + 1) // 2)).run()
        Machine(schedule.with_loss_stage()).run()
        for rank, row in enumerate(schedule.computations):
            pairs = [(stage, i) for stage in schedule.stages_of(rank) for i in range(schedule.microbatches)]
            kinds = {pair: "".join(a.kind.value for a in row if (a.stage, a.microbatch) == pair) for pair in pairs}
            assert set(kinds.values()) <= {"FB", "FIW"}
            assert len(row) == sum(map(len, kinds.values()))
        assert schedule.splits_backward == ("W" in str(schedule.computations))
        check_messages(schedule)


def check_messages(schedule: Schedule) -> None:
    """Two ranks have the same order of messages between them, and no message is superfluous."""
    talk: dict[tuple[int, int], list[Action]] = defaultdict(list)
    rows, sends = schedule.with_communication, (ActionKind.SEND_F, ActionKind.SEND_B)
    for rank, row in enumerate(rows):
        for action in row:
            if other := peer(schedule, action):
                talk[rank, other[0]].append(min(action, other[1], key=str))
    assert all(talk[there, here] == messages for (here, there), messages in list(talk.items()))
    p, stages = schedule.ranks, schedule.stages
    boundaries = 0 if p == 1 else 2 * (p - 1) if schedule.name == "zbv" else stages - 1
    sent = [action for row in rows for action in row if action.kind in sends]
    assert len(sent) == len(set(sent)) == 2 * schedule.microbatches * boundaries


def in_torch(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> tuple[tuple[Action, ...], ...]:
    """PyTorch's order, drawn from its class without a process group."""
    rounds = max(1, microbatches // ranks)
    stand_in: Any = SimpleNamespace(
        pp_group_size=ranks,
        num_stages=ranks * stages_per_rank,
        n_local_stages=stages_per_rank,
        microbatches_per_round=microbatches // rounds,
        _n_microbatches=microbatches,
        _stages=[None] * stages_per_rank,
    )
    rows = (FROM_TORCH[name]._calculate_single_rank_operations(stand_in, rank) for rank in range(ranks))
    return tuple(tuple(ours(action) for action in row if action) for row in rows)


def ours(action: Any) -> Action:
    return Action(action.stage_index, ActionKind(action.computation_type.value), action.microbatch_index)


@pytest.mark.parametrize("name", FROM_TORCH)
def test_orders_are_those_of_pytorch(name: str) -> None:
    for schedule in schedules_of(name):
        stages_per_rank = schedule.stages // schedule.ranks
        assert schedule.computations == in_torch(name, schedule.ranks, schedule.microbatches, stages_per_rank)


def test_rows_grids_and_messages_of_small_schedules() -> None:
    rows = make_schedule("1f1b", ranks=4, microbatches=6).computations
    assert " ".join(map(str, rows[1])) == "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5"
    assert " ".join(map(str, make_schedule("gpipe", 2, 2).computations[1])) == "1F0 1F1 1B0 1B1"
    assert make_schedule("1f1b", ranks=2, microbatches=3).grid().splitlines() == [
        "rank 0 | 0F0 0F1     0B0 0F2 0B1     0B2",
        "rank 1 |     1F0 1B0 1F1 1B1 1F2 1B2",
    ]
    assert make_schedule("interleaved_1f1b", 2, 2, stages_per_rank=3).stages_of(1) == (1, 3, 5)
    assert [make_schedule("zbv", 2, 4).rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]
    first, last = make_schedule("1f1b", ranks=2, microbatches=1).with_communication
    assert " ".join(map(str, first)) == "0F0 0SEND_F0 0RECV_B0 0B0"
    assert " ".join(map(str, last)) == "1RECV_F0 1F0 1B0 1SEND_B0"


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_is_written_and_read(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, ranks=2, microbatches=4)
    file = tmp_path / "own.csv"
    file.write_text(schedule.csv())
    read = make_schedule(str(file), ranks=2, microbatches=4)
    assert (read.computations, read.stages, read.csv()) == (schedule.computations, schedule.stages, schedule.csv())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n", "has 1 ranks (one per row) and 1 microbatches, but the pipeline has 2 ranks and 1 microbatches"),
        ("", "0 of its 0 rows have actions"),
        ("0F0,0B0\n1F0,,1X0\n", "row 2, column 3: '1X0' is no action; write one action per cell"),
        ("\N{DEGREE SIGN}", "is no action; write"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "0F0 appears twice; run every action once"),
        ("0F0,1B0\n1F0,0B0\n", "stage 1 runs on ranks 1 and 0; keep it on one rank"),
        ("0F1,0B1\n1F1,1B1\n", "stage 0 runs nothing of microbatch 0; run F and B, or F, I and W, of every microbatch"),
        ("0F0,0I0\n1F0,1B0\n", "stage 0 runs F I of microbatch 0; run F and B, or F, I and W"),
        ("0F0,0B0\n1F0\n", "rank 0 at 0B0 for 1B0 or 1I0, which no rank runs"),
        ("0F0,0B0\n1B0,1F0\n", "ranks wait for ever: rank 0 at 0B0 for 1B0 or 1I0; rank 1 at 1B0 for 1F0"),
    ],
)
def test_wrong_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.csv"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}.*{re.escape(message)}"):
        make_schedule(str(file), ranks=2, microbatches=1)


def test_file_of_other_stages_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text(make_schedule("zbv", ranks=2, microbatches=4).csv())
    with pytest.raises(ValueError, match=r"its ranks hold \[2, 2\] stages, but stages_per_rank is 3; leave it out"):
        make_schedule(str(file), ranks=2, microbatches=4, stages_per_rank=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1bb", 2, 2), "'1f1bb' is no schedule; did you mean '1f1b'"),
        (("nowhere.csv", 2, 2), "there is no file nowhere.csv; give"),
        (("gpipe", 0, 2), "ranks=0 must be at least 1"),
        (("gpipe", 2, 0), "microbatches=0 must be at least 1"),
        (("interleaved_1f1b", 2, 2, 0), "stages_per_rank=0 must be at least 1"),
        (("1f1b", 2, 2, 2), r"1f1b runs 1 stage per rank, not 2; .* \['interleaved_1f1b', 'looped_bfs'"),
        (("zbv", 2, 2, 1), "zbv runs 2 stages per rank, not 1"),
        (("interleaved_1f1b", 4, 9), "at least 4 microbatches each: 9 cannot be divided into 2; nearest are 8 and 10"),
        (("interleaved_zero_bubble", 2, 5), "5 cannot be divided into 2; nearest are 4 and 6"),
    ],
)
def test_arguments_that_break_a_rule_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)


# ---------------------------------------------------------------- simulated steps


def closed_forms(name: str, p: int, m: int, v: int) -> tuple[float, tuple[float, ...]]:
    """Bubble and peak activations of each rank, at equal costs of F, I and W."""
    rounds = m if name in ("gpipe", "1f1b") else v * m if name in ("interleaved_1f1b", "looped_bfs") else 3 * v * m
    peaks = {"gpipe": lambda rank: m, "looped_bfs": lambda rank: m, "1f1b": lambda rank: min(m, p - rank)}
    peaks["interleaved_1f1b"] = lambda rank: p + (p - 1 - 2 * rank) / v
    return (p - 1) / (rounds + p - 1), tuple(peaks.get(name, lambda rank: p)(rank) for rank in range(p))


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubbles_and_peaks_are_the_closed_forms(name: str) -> None:
    for p, m in ((2, 8), (4, 8), (8, 16), (8, 64)):
        schedule = make_schedule(name, p, m)
        bubble, peaks = closed_forms(name, p, m, schedule.stages // p)
        assert simulate(schedule).bubble == pytest.approx(bubble, abs=1e-12)
        assert simulate(schedule).peak_activations == peaks
    schedule = make_schedule(name, 4, 8)
    assert simulate(schedule, (1, 1.3, 0.7)).step >= 8 * 3 + 3 / (schedule.stages // 4) - 1e-9  # no schedule is faster
    assert simulate(make_schedule(name, 1, 4)).bubble == pytest.approx(0)


def test_unequal_gradients_and_latency_leave_a_bubble() -> None:
    for name, bubble in (("interleaved_zero_bubble", 0.093), ("zbv", 0.080)):
        assert simulate(make_schedule(name, 8, 16), (1, 1.2, 0.8)).bubble == pytest.approx(bubble, abs=5e-4)
    schedule = make_schedule("gpipe", 3, 1)
    assert simulate(schedule, latency=0.5).step == simulate(schedule).step + 4 * 0.5
    assert simulate(make_schedule("zbv", 1, 2), latency=9).step == simulate(make_schedule("zbv", 1, 2)).step


def test_impossible_costs_are_refused() -> None:
    for wrong, said in (((-1, 1, 1), "-1, 1, 1, 0"), ((0, 0, 0), "0, 0, 0, 0")):
        with pytest.raises(ValueError, match=f"the times {said} are not valid"):
            simulate(make_schedule("1f1b", 2, 2), wrong)
    with pytest.raises(ValueError, match=r"the times 1, 1, 1, nan are not valid"):
        simulate(make_schedule("1f1b", 2, 2), latency=float("nan"))


# ---------------------------------------------------------------- blocks of stages


def divisions(blocks: int, stages: int) -> Iterator[list[range]]:
    for cuts in combinations(range(1, blocks), stages - 1):
        yield [range(start, stop) for start, stop in pairwise((0, *cuts, blocks))]


def slowest(stages: list[range], costs: list[int], first: int, last: int) -> int:
    times = [sum(costs[i] for i in stage) for stage in stages]
    times[0] += first
    times[-1] += last
    return max(times)


@pytest.mark.parametrize("cuts_anywhere", [True, False])
def test_stages_are_the_best_of_every_division(cuts_anywhere: bool) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        costs = [draw.randint(0, 6) for _ in range(draw.randint(2, 9))]
        stages, first, last = draw.randint(1, len(costs)), draw.randint(0, 9), draw.randint(0, 9)
        uncut = set() if cuts_anywhere else {draw.randint(1, len(costs)) for _ in range(3)}
        got, every = balance_stages(costs, stages, first, last, uncut=uncut), list(divisions(len(costs), stages))
        every = [each for each in every if uncut.isdisjoint(stage.start for stage in each)] or every
        best = min(slowest(division, costs, first, last) for division in every)
        ties = [division for division in every if slowest(division, costs, first, last) == best]
        assert got in ties
        assert not cuts_anywhere or len(got[-1]) == min(len(division[-1]) for division in ties)
    assert list(map(len, balance_stages([0.1] * 12, 4))) == [3, 3, 3, 3]
    assert list(map(len, balance_stages([0.1] * 7, 4))) == [2, 2, 2, 1]
    assert list(map(len, balance_stages([1.0] * 12, 4, first_extra=1, last_extra=3))) == [3, 4, 4, 1]


@pytest.mark.parametrize(
    ("costs", "stages", "message"),
    [
        ([1.0] * 3, 4, "3 blocks cannot make 4 stages, each of at least one block; take 1 to 3 stages"),
        ([1.0] * 3, 0, "3 blocks cannot make 0 stages"),
        ([1.0, -2.0], 2, "-2.0 is no cost of a block or stage"),
        ([1.0, float("nan")], 2, "nan is no cost"),
    ],
)
def test_impossible_stages_are_refused(costs: list[float], stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance_stages(costs, stages)


# ---------------------------------------------------------------- the command, and the pictures of the documents


def test_command_prints_grid_bubble_and_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(arguments: str) -> str:
        main(arguments.split())
        return capsys.readouterr().out

    said = printed("1f1b --ranks 4 --microbatches 8")
    assert said.startswith("1f1b: 4 ranks, 4 stages, 8 microbatches\n")
    assert make_schedule("1f1b", 4, 8).grid() in said
    assert "step              33, of which 24 without waiting" in said
    assert "bubble            27.3 %" in said
    assert "peak activations  4 3 2 1" in said
    said = printed("zbv --ranks 8 --microbatches 16 --costs 1,1.2,0.8")
    assert "8 ranks, 16 stages, 16 microbatches, backward split into I and W" in said
    assert "of which 48 without waiting" in said
    assert "bubble            8.0 %" in said
    options = "--ranks 4 --stages-per-rank 3 --microbatches 2 --latency 0.5"
    assert "4 ranks, 12 stages" in printed(f"looped_bfs {options}")
    said = printed(f"zbv --ranks 2 --microbatches 4 --csv {tmp_path}/own.csv")
    assert printed(f"{tmp_path}/own.csv").splitlines()[1:] == said.splitlines()[1:]


def test_documents_show_every_schedule(tmp_path: Path) -> None:
    guide = (DOCS / "guide" / "pipeline_parallel.md").read_text()
    for name in SCHEDULES:
        assert f"../pictures/schedule_{name}.png" in guide
        assert (DOCS / "pictures" / f"schedule_{name}.png").stat().st_size < 100_000
    script = runpy.run_path(str(DOCS / "pictures" / "schedules.py"))
    script["draw"](make_schedule("zbv", 2, 4), tmp_path / "zbv.png")
    assert (tmp_path / "zbv.png").stat().st_size > 1_000
