"""Actions of a schedule, and a simulation that computes when each of them starts and ends.

An action is written as stage, kind and microbatch: `2F0` is the forward of stage 2 on microbatch 0.
"""

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple


class ActionKind(str, Enum):
    """F: forward; B: full backward; I: input gradients; W: weight gradients; SEND and RECV: messages between stages."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  (the field's name)
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    __hash__ = str.__hash__  # Enum.__hash__ is implemented in Python, which is slow for the many lookups


class Action(NamedTuple):
    """A computation of `stage` on a microbatch, or a message that `stage` sends (SEND) or receives (RECV)."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


Orders = Sequence[Sequence[Action]]
"""Computations by rank, in the order in which the rank executes them."""


def needs(action: Action, stages: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions that a computation waits for: one of each tuple, e.g. 1B0 waits for 1F0 and for 2B0 or 2I0."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is ActionKind.F:
        return ((Action(stage - 1, ActionKind.F, microbatch),),) if stage else ()
    if kind is ActionKind.W:
        return ((Action(stage, ActionKind.I, microbatch),),)
    forward = (Action(stage, ActionKind.F, microbatch),)
    if stage == stages - 1:
        return (forward,)
    return forward, (Action(stage + 1, ActionKind.B, microbatch), Action(stage + 1, ActionKind.I, microbatch))


def action_times(
    orders: Orders, stages: int, cost: Callable[[Action], float] | None = None, latency: float = 0
) -> dict[Action, tuple[float, float]]:
    """Return start and end of each action if each rank executes its actions in order, each as early as possible.

    `cost` returns the duration of an action (default: 1); `latency` is the time that a result takes to another rank.

    Raises:
        ValueError: the orders are no complete schedule: ranks deadlock, a stage runs on two ranks, or an action is
            missing or repeated.
    """
    times: dict[Action, tuple[float, float]] = {}
    rank_of: dict[int, int] = {}  # stage -> rank
    # by rank: the actions that have not run, and the end of the last one that has
    waiting, free = [deque(order) for order in orders], [0.0] * len(orders)

    def arrival(action: Action, rank: int) -> float | None:
        """Return the time at which all inputs of the action are on this rank; None if one is not computed yet."""
        latest = 0.0
        for choices in needs(action, stages):
            source = next((choice for choice in choices if choice in times), None)
            if source is None:
                return None
            latest = max(latest, times[source][1] + latency * (rank_of[source.stage] != rank))
        return latest

    while ready := {
        rank: time for rank, row in enumerate(waiting) if row and (time := arrival(row[0], rank)) is not None
    }:
        for rank, time in ready.items():
            action = waiting[rank].popleft()
            if (holder := rank_of.setdefault(action.stage, rank)) != rank:
                raise ValueError(f"stage {action.stage} runs on ranks {holder} and {rank}; keep it on one rank")
            if action in times:
                raise ValueError(f"{action} appears twice; run every action once")
            start = max(free[rank], time)
            free[rank] = start + (1 if cost is None else cost(action))
            times[action] = start, free[rank]
    _check_complete(orders, stages, times)
    return times


def _check_complete(orders: Orders, stages: int, times: dict[Action, tuple[float, float]]) -> None:
    waits = []
    for rank, order in enumerate(orders):
        if action := next((action for action in order if action not in times), None):
            choices = next(choices for choices in needs(action, stages) if not times.keys() & choices)
            text = " or ".join(map(str, choices))
            exists = any(choice in other for choice in choices for other in orders)
            waits.append(f"rank {rank} at {action} for {text}{'' if exists else ', which no rank runs'}")
    if waits:
        raise ValueError(f"ranks wait for ever: {'; '.join(waits)}")
    for stage in range(stages):
        for microbatch in range(1 + max(action.microbatch for action in times)):
            kinds = "".join(kind for kind in "FBIW" if Action(stage, ActionKind(kind), microbatch) in times)
            if kinds not in ("FB", "FIW"):
                raise ValueError(
                    f"stage {stage} runs {' '.join(kinds) or 'nothing'} of microbatch {microbatch}; "
                    "run F and B, or F, I and W, of every microbatch on every stage"
                )


MESSAGES = {
    ActionKind.F: (ActionKind.SEND_F, ActionKind.RECV_F, 1),
    ActionKind.B: (ActionKind.SEND_B, ActionKind.RECV_B, -1),
    ActionKind.I: (ActionKind.SEND_B, ActionKind.RECV_B, -1),
}
"""Computation -> (action that sends its result, action that receives it, receiving stage minus sending stage)."""
