"""Sends and receives of a pipeline, placed between computations so that ranks never wait for each other in a circle."""

from collections.abc import Callable
from operator import itemgetter

from lightning_parallel.techniques.pipeline_parallel.schedule.actions import Action, ActionKind, Orders, action_times

MESSAGES = {
    ActionKind.F: (ActionKind.SEND_F, ActionKind.RECV_F, 1),
    ActionKind.B: (ActionKind.SEND_B, ActionKind.RECV_B, -1),
    ActionKind.I: (ActionKind.SEND_B, ActionKind.RECV_B, -1),
}
"""How the result of a computation is sent and received, and how many stages further."""

SLOTS = {ActionKind.F: 1, ActionKind.B: 2, ActionKind.I: 1, ActionKind.W: 1}


def with_communication(orders: Orders, stages: int, rank_of: Callable[[int], int]) -> tuple[tuple[Action, ...], ...]:
    """Add sends and receives to the computations of each rank.

    All messages are ordered by the time at which they are ready if a backward takes twice a forward. Each rank sends
    and receives its own in that order, and starts a computation before the messages that are ready later. So at any
    moment the first message that has not been delivered is the next one of both its ranks: no circle can form, even if
    every send waits for its receiver and a pair of ranks carries one message at a time.

    `rank_of` names the rank that holds a stage.
    """
    times = action_times(orders, stages, cost=lambda action: SLOTS[action.kind])
    rows: list[list[tuple[float, int, int, Action]]] = [
        [(times[action][0], 1, number, action) for number, action in enumerate(order)] for order in orders
    ]
    ends = [(times[action][1], action) for order in orders for action in order if action.kind in MESSAGES]
    for number, (end, (stage, kind, microbatch)) in enumerate(sorted(ends, key=itemgetter(0))):
        send, receive, further = MESSAGES[kind]
        to = stage + further
        if 0 <= to < stages and rank_of(to) != rank_of(stage):
            rows[rank_of(stage)].append((end, 0, number, Action(stage, send, microbatch)))
            rows[rank_of(to)].append((end, 0, number, Action(to, receive, microbatch)))
    return tuple(tuple(entry[-1] for entry in sorted(row, key=lambda entry: entry[:3])) for row in rows)
