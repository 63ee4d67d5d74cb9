"""Sends and receives of a pipeline, placed between computations so that ranks never wait for each other in a circle."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_parallel.techniques.pipeline_parallel.schedule.actions import Action, ActionKind, Orders, action_times

SLOTS = {ActionKind.F: 1, ActionKind.B: 2, ActionKind.I: 1, ActionKind.W: 1}


@dataclass(frozen=True)
class Message:
    """A message from a stage to a stage of another rank, with the actions that send and receive it.

    `time` is the end of the computation whose result it carries.
    """

    time: float
    sender: int
    receiver: int
    send: Action
    receive: Action


def with_communication(orders: Orders, stages: int, rank_of: Callable[[int], int]) -> tuple[tuple[Action, ...], ...]:
    """Add sends and receives to the computations of each rank.

    All messages are ordered by the time at which they are ready if a backward takes twice a forward. Each rank sends
    and receives its own in that order, and starts a computation before the messages that are ready later. So at any
    moment the first message that has not been delivered is the next one of both its ranks: no circle can form, even if
    every send waits for its receiver and a pair of ranks carries one message at a time.

    Args:
        orders: Computations of each rank.
        stages: Number of stages of the pipeline.
        rank_of: The rank that holds a stage.
    """
    times = action_times(orders, stages, cost=lambda action: SLOTS[action.kind])
    messages = sorted(_messages(orders, stages, rank_of, times), key=lambda message: message.time)
    rows: list[list[tuple[float, int, int, Action]]] = [
        [(times[action][0], 1, number, action) for number, action in enumerate(order)] for order in orders
    ]
    for number, message in enumerate(messages):
        rows[message.sender].append((message.time, 0, number, message.send))
        rows[message.receiver].append((message.time, 0, number, message.receive))
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
