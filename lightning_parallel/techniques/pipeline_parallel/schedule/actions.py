"""Actions, of which the order of a rank is made: `2F0` is the forward of stage 2 on microbatch 0."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum


class ActionKind(str, Enum):
    """F: forward; B: full backward; I: input gradient; W: weight gradient; and what stages send each other."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  (the field's name)
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    __hash__ = str.__hash__  # an Enum's own is computed in Python, and schedules look up many actions

    @property
    def computes(self) -> bool:
        """Whether an action of this kind is work of the rank itself, not communication."""
        return self in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)


@dataclass(frozen=True)
class Action:
    """One thing to do for one stage and one microbatch.

    Args:
        stage: Number of the stage in the model, from 0; SEND names the sending, RECV the receiving one.
        kind: What to do.
        microbatch: Number of the microbatch, from 0.
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    __str__ = __repr__


Orders = Sequence[Sequence[Action]]
"""Per rank what it does, one after another."""

CELL = re.compile(r"(\d+)([FBIW])(\d+)")
OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def parse(cell: str) -> tuple[Action, ...]:
    """The actions of a cell: none for an empty one, two for PyTorch's `(0F4;7B1)OVERLAP_F_B`.

    Raises:
        ValueError: The text is no action.
    """
    cell = cell.strip()
    if not cell:
        return ()
    if overlap := OVERLAP.fullmatch(cell):
        return tuple(action for part in overlap[1].split(";") for action in parse(part))
    match = CELL.fullmatch(cell)
    if match is None:
        raise ValueError(f"{cell!r} is no action: write <stage><F, B, I or W><microbatch>, as in 2F0")
    return (Action(int(match[1]), ActionKind(match[2]), int(match[3])),)


def needs(action: Action, stages: int) -> tuple[tuple[Action, ...], ...]:
    """The actions that must be over before a computation: of every tuple one (a backward is B or I).

    Args:
        action: A computation.
        stages: How many stages the pipeline has.
    """
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is ActionKind.F:
        return ((Action(stage - 1, ActionKind.F, microbatch),),) if stage else ()
    if kind is ActionKind.W:
        return ((Action(stage, ActionKind.I, microbatch),),)
    own = (Action(stage, ActionKind.F, microbatch),)
    if stage == stages - 1:
        return (own,)
    return own, (Action(stage + 1, ActionKind.B, microbatch), Action(stage + 1, ActionKind.I, microbatch))


def run(
    orders: Orders, stages: int, cost: Callable[[Action], float], latency: float = 0
) -> dict[Action, tuple[float, float]]:
    """Start and end of every action when each rank works through its order as early as it can.

    Args:
        orders: Computations per rank.
        stages: How many stages the pipeline has.
        cost: How long an action takes.
        latency: How long a result travels to another rank.

    Raises:
        ValueError: The orders wait for each other; the message says who for what.
    """
    rank_of = {action: rank for rank, order in enumerate(orders) for action in order}
    times: dict[Action, tuple[float, float]] = {}
    done, free = [0] * len(orders), [0.0] * len(orders)

    def arrival(action: Action, rank: int) -> float | None:
        """When the last thing that the action needs is on this rank; None while that is not known."""
        latest = 0.0
        for choices in needs(action, stages):
            met = next((choice for choice in choices if choice in times), None)
            if met is None:
                return None
            latest = max(latest, times[met][1] + (latency if rank_of[met] != rank else 0))
        return latest

    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(orders):
            while done[rank] < len(order) and (ready := arrival(order[done[rank]], rank)) is not None:
                action = order[done[rank]]
                start = max(free[rank], ready)
                free[rank] = start + cost(action)
                times[action] = (start, free[rank])
                done[rank] += 1
                progress = True
    stuck = [(rank, order[done[rank]]) for rank, order in enumerate(orders) if done[rank] < len(order)]
    if stuck:
        raise ValueError("the ranks wait for each other: " + "; ".join(_waits(*one, stages, times) for one in stuck))
    return times


def _waits(rank: int, action: Action, stages: int, times: dict[Action, tuple[float, float]]) -> str:
    missing = next(choices for choices in needs(action, stages) if not any(choice in times for choice in choices))
    return f"rank {rank} at {action} for {' or '.join(map(str, missing))}"
