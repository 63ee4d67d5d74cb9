"""Schedules as data: PyTorch's orders, complete, free of deadlock; what is refused says why."""

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as theirs

from lightning_parallel.techniques.pipeline_parallel.schedule import communication
from lightning_parallel.techniques.pipeline_parallel.schedule.actions import Action, ActionKind
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import (
    SCHEDULES,
    Schedule,
    make_schedule,
    nearest_legal_microbatches,
)

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
        self.lists = [deque(row) for row in schedule.with_communication()]
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
def test_no_rank_waits_for_ever(name: str) -> None:
    for schedule in schedules_of(name):
        Machine(schedule).run()
        Machine(schedule.only((schedule.microbatches + 1) // 2)).run()
        Machine(schedule.with_loss_stage()).run()


@pytest.mark.parametrize("name", SCHEDULES)
def test_loss_stage_waits_for_all_microbatches(name: str) -> None:
    schedule = make_schedule(name, 2, 8)
    for whole in (schedule.with_loss_stage(), schedule.with_loss_stage().only(3)):
        row = whole.computations[schedule.rank_of(schedule.stages - 1)]
        loss = [number for number, action in enumerate(row) if action.stage == schedule.stages]
        last = [number for number, action in enumerate(row) if action.stage == schedule.stages - 1]
        forwards, backwards = loss[: whole.microbatches], loss[whole.microbatches :]
        assert all(row[number].kind is ActionKind.F for number in forwards)
        assert all(row[number].kind is ActionKind.B for number in backwards)
        assert sum(number < forwards[0] for number in last) == whole.microbatches
        assert all(number > backwards[-1] for number in last[whole.microbatches :])


@pytest.mark.parametrize("name", SCHEDULES)
def test_pair_of_ranks_orders_its_messages_alike(name: str) -> None:
    for schedule in schedules_of(name):
        talk: dict[tuple[int, int], list[Action]] = defaultdict(list)
        for rank, row in enumerate(schedule.with_communication()):
            for action in row:
                if other := peer(schedule, action):
                    talk[rank, other[0]].append(min(action, other[1], key=str))
        assert all(talk[there, here] == messages for (here, there), messages in list(talk.items()))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_runs_every_microbatch_once(name: str) -> None:
    for schedule in schedules_of(name):
        for rank, row in enumerate(schedule.computations):
            pairs = [(stage, i) for stage in schedule.stages_of(rank) for i in range(schedule.microbatches)]
            kinds = {pair: "".join(a.kind.value for a in row if (a.stage, a.microbatch) == pair) for pair in pairs}
            assert set(kinds.values()) <= {"FB", "FIW"}
            assert len(row) == sum(map(len, kinds.values()))
        assert schedule.splits_backward == ("W" in str(schedule.computations))


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
def test_order_is_that_of_pytorch(name: str) -> None:
    for schedule in schedules_of(name):
        stages_per_rank = schedule.stages // schedule.ranks
        assert schedule.computations == in_torch(name, schedule.ranks, schedule.microbatches, stages_per_rank)


def test_1f1b_keeps_no_more_than_the_stages_that_follow() -> None:
    rows = make_schedule("1f1b", ranks=4, microbatches=6).computations
    assert " ".join(map(str, rows[1])) == "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5"
    assert " ".join(map(str, rows[3])) == "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5"
    assert " ".join(map(str, make_schedule("gpipe", 2, 2).computations[1])) == "1F0 1F1 1B0 1B1"


def test_grid_shows_ranks_over_time() -> None:
    assert make_schedule("1f1b", ranks=2, microbatches=3).grid().splitlines() == [
        "rank 0 | 0F0 0F1     0B0 0F2 0B1     0B2",
        "rank 1 |     1F0 1B0 1F1 1B1 1F2 1B2",
    ]


def test_stages_lie_in_loops_or_in_a_v() -> None:
    assert make_schedule("interleaved_1f1b", 2, 2, stages_per_rank=3).stages_of(1) == (1, 3, 5)
    assert [make_schedule("zbv", 2, 4).rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]


def test_communication_frames_the_computations() -> None:
    first, last = make_schedule("1f1b", ranks=2, microbatches=1).with_communication()
    assert " ".join(map(str, first)) == "0F0 0SEND_F0 0RECV_B0 0B0"
    assert " ".join(map(str, last)) == "1RECV_F0 1F0 1B0 1SEND_B0"


@pytest.mark.parametrize("name", SCHEDULES)
def test_file_gives_the_same_schedule(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, ranks=2, microbatches=4)
    file = tmp_path / "own.csv"
    file.write_text(schedule.csv())
    read = make_schedule(str(file), ranks=2, microbatches=4)
    assert (read.computations, read.stages, read.csv()) == (schedule.computations, schedule.stages, schedule.csv())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n", "has 1 ranks (one per row) and 1 microbatches, but the pipeline has 2 ranks and 1 microbatches"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n", "and 2 microbatches, but the pipeline has 2 ranks and 1 microbatches"),
        ("0F0,0B0\n,\n", "1 of its 2 rows have actions; write a row per rank"),
        ("", "0 of its 0 rows have actions"),
        ("0F0,0B0\n1F0,,1X0\n", "row 2, column 3: '1X0' is no action; write one action per cell"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", "row 1, column 2: '0SEND_F0' is no action"),
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n", "row 1, column 2: '(0F1;0B0)OVERLAP_F_B' is no action"),
        ("\N{DEGREE SIGN}", "is no action; write"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "0F0 appears twice; run every action once"),
        ("0F0,1B0\n1F0,0B0\n", "stage 1 runs on ranks 1 and 0; keep it on one rank"),
        ("0F0,0B0\n2F0,2B0\n", "rank 1 at 2F0 for 1F0, which no rank runs"),
        ("0F1,0B1\n1F1,1B1\n", "stage 0 runs nothing of microbatch 0; run F and B, or F, I and W, of every microbatch"),
        ("0F0,0I0\n1F0,1B0\n", "stage 0 runs F I of microbatch 0; run F and B, or F, I and W"),
        ("0F0,0B0\n1F0\n", "rank 0 at 0B0 for 1B0 or 1I0, which no rank runs"),
        ("0F0,0B0\n1F0,1I0,1B0,1W0\n", "stage 1 runs F B I W of microbatch 0"),
        ("0F0,0B0\n1B0,1F0\n", "ranks wait for ever: rank 0 at 0B0 for 1B0 or 1I0; rank 1 at 1B0 for 1F0"),
        ("0F0,0W0,0I0\n1F0,1B0\n", "ranks wait for ever: rank 0 at 0W0 for 0I0"),
    ],
)
def test_wrong_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.csv"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}.*{re.escape(message)}"):
        make_schedule(str(file), ranks=2, microbatches=1)


def test_file_with_another_number_of_stages_is_refused(tmp_path: Path) -> None:
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
def test_what_breaks_a_rule_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)


def test_fewer_microbatches_keep_the_order() -> None:
    schedule = make_schedule("zbv", ranks=2, microbatches=8)
    kept = schedule.only(3)
    assert kept.microbatches == 3
    assert kept.computations == tuple(tuple(a for a in row if a.microbatch < 3) for row in schedule.computations)
    with pytest.raises(ValueError, match="9 microbatches are not within 1 to 8"):
        schedule.only(9)


def test_short_batches_simulate_their_schedule_once(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = []
    original = communication.action_times
    monkeypatch.setattr(
        communication, "action_times", lambda *args, **kwargs: simulated.append(args) or original(*args, **kwargs)
    )
    schedule = make_schedule("1f1b", ranks=2, microbatches=8)
    first, second = schedule.only(3).with_communication(), schedule.only(3).with_communication()
    assert first is second
    assert len(simulated) == 1
    schedule.only(2).with_communication()
    assert len(simulated) == 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_message_is_superfluous(name: str) -> None:
    for schedule in schedules_of(name):
        p, m, stages = schedule.ranks, schedule.microbatches, schedule.stages
        boundaries = 0 if p == 1 else 2 * (p - 1) if name == "zbv" else stages - 1
        sent = [
            a for row in schedule.with_communication() for a in row if a.kind in (ActionKind.SEND_F, ActionKind.SEND_B)
        ]
        assert len(sent) == len(set(sent)) == 2 * m * boundaries
