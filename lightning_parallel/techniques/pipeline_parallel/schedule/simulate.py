"""The duration of a schedule and the activations that it keeps, computed from the costs of a rank's layers."""

import itertools
import math
from typing import NamedTuple

from lightning_parallel.techniques.pipeline_parallel.schedule.actions import Action, ActionKind, action_times
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import Schedule


class Timeline(NamedTuple):
    """A simulated schedule."""

    times: dict[Action, tuple[float, float]]  # start and end of each action
    step: float  # the end of the last action
    # the idle share of the ranks' time: 1 - ideal / step. The ideal is the work divided evenly over ranks
    bubble: float
    # per rank the largest number of microbatches whose activations it keeps, each from F to the end of B, or of W if
    # the backward is split. On a rank with v stages, each of them counts 1 / v
    peak_activations: tuple[float, ...]


def simulate(schedule: Schedule, costs: tuple[float, float, float] = (1, 1, 1), latency: float = 0) -> Timeline:
    """Simulate a schedule: each rank computes in its order, each action as early as possible.

    Args:
        schedule: Orders of all ranks.
        costs: Times of F, I and W of one rank's layers for one microbatch. B takes I + W; each of v stages of a rank
            takes 1 / v of these times.
        latency: Time of an activation or gradient to another rank; ranks compute meanwhile.

    Raises:
        ValueError: A time is negative or infinite, or all costs are 0.
    """
    if not all(0 <= time < math.inf for time in (*costs, latency)) or not any(costs):
        found = ", ".join(f"{time:g}" for time in (*costs, latency))
        raise ValueError(f"the times {found} make no timeline; give finite costs above 0 and no negative latency")
    cost = dict(zip("FIWB", (*costs, costs[1] + costs[2]), strict=True))
    held = [len(schedule.stages_of(rank)) for rank in range(schedule.ranks)]  # stages of each rank
    times = action_times(
        schedule.computations,
        schedule.stages,
        lambda action: cost[action.kind] / held[schedule.rank_of(action.stage)],
        latency,
    )
    step = max(end for _, end in times.values())
    work = sum(end - start for start, end in times.values())
    peaks = []
    for stages, row in zip(held, schedule.computations, strict=True):
        kept = [(a.kind is ActionKind.F) - (a.kind in (ActionKind.B, ActionKind.W)) for a in row]
        peaks.append(max(itertools.accumulate(kept)) / stages)
    return Timeline(times, step, 1 - work / (schedule.ranks * step), tuple(peaks))
