"""Sends and receives between the actions of a pipeline, placed so that no ranks wait for each other in a circle."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_parallel.techniques.pipeline_parallel.schedule.actions import Action, ActionKind, Orders, run

SLOTS = {ActionKind.F: 1, ActionKind.B: 2, ActionKind.I: 1, ActionKind.W: 1}


@dataclass(frozen=True)
class Message:
    """A message from one stage to another rank's stage: the action that sends it and the one that receives it."""

    time: float
    sender: int
    receiver: int
    send: Action
    receive: Action


def with_communication(orders: Orders, stages: int, rank_of: Callable[[int], int]) -> tuple[tuple[Action, ...], ...]:
    """Adds to every rank's computations what it sends and receives.

    All messages stand in one line, by the time at which they are ready if a backward takes twice a forward. Each rank
    meets its own in that order, and computes in between what begins later than they are ready. So at any moment the
    first message of the line that is not delivered is the next one of both its ranks: no circle can form, even if every
    send waits for its receiver and a pair of ranks carries one message at a time.

    Args:
        orders: Computations per rank.
        stages: How many stages the pipeline has.
        rank_of: The rank that holds a stage.
    """
    times = run(orders, stages, cost=lambda action: SLOTS[action.kind])
    line = sorted(_messages(orders, stages, rank_of, times), key=lambda message: message.time)
    rows: list[list[tuple[float, int, int, Action]]] = [
        [(times[action][0], 1, place, action) for place, action in enumerate(order)] for order in orders
    ]
    for place, message in enumerate(line):
        rows[message.sender].append((message.time, 0, place, message.send))
        rows[message.receiver].append((message.time, 0, place, message.receive))
    return tuple(tuple(entry[-1] for entry in sorted(row, key=lambda entry: entry[:3])) for row in rows)


def _messages(
    orders: Orders, stages: int, rank_of: Callable[[int], int], times: dict[Action, tuple[float, float]]
) -> Iterator[Message]:
    for rank, order in enumerate(orders):
        for action in order:
            forward = action.kind is ActionKind.F
            to = action.stage + (1 if forward else -1)
            if action.kind is ActionKind.W or not 0 <= to < stages or rank_of(to) == rank:
                continue
            send, receive = (
                (ActionKind.SEND_F, ActionKind.RECV_F) if forward else (ActionKind.SEND_B, ActionKind.RECV_B)
            )
            yield Message(
                times[action][1],
                rank,
                rank_of(to),
                Action(action.stage, send, action.microbatch),
                Action(to, receive, action.microbatch),
            )
