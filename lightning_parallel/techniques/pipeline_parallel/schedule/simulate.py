"""Simulation of a schedule: its duration, bubble and activation memory, from the costs of a rank's layers."""

import itertools
import math
from typing import NamedTuple

from lightning_parallel.techniques.pipeline_parallel.schedule.actions import Action, ActionKind, action_times
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import Schedule


class Timeline(NamedTuple):
    """Result of simulating a schedule."""

    times: dict[Action, tuple[float, float]]  # start and end of each action
    step: float  # duration of the step: the end of the last action
    # idle fraction of the ranks' time: 1 - ideal / step, where the ideal is the total work divided by the ranks
    bubble: float
    # by rank: the largest number of microbatches whose activations it keeps at once, each from F to the end of B, or of
    # W if the backward is split. On a rank with v stages, the activations of one stage count 1 / v
    peak_activations: tuple[float, ...]


def simulate(schedule: Schedule, costs: tuple[float, float, float] = (1, 1, 1), latency: float = 0) -> Timeline:
    """Simulate a schedule: each rank executes its actions in order, each as early as possible.

    Args:
        schedule: The schedule.
        costs: Times of F, I and W for one microbatch on all layers of a rank. B takes I + W; on a rank with v stages,
            each stage takes 1 / v of these times.
        latency: Time that an activation or gradient takes to another rank; ranks compute meanwhile.

    Raises:
        ValueError: A time is negative or infinite, or all costs are 0.
    """
    if not all(0 <= time < math.inf for time in (*costs, latency)) or not any(costs):
        values = ", ".join(f"{time:g}" for time in (*costs, latency))
        raise ValueError(f"the times {values} are not valid; give finite costs above 0 and no negative latency")
    cost = dict(zip("FIWB", (*costs, costs[1] + costs[2]), strict=True))
    stage_counts = [len(schedule.stages_of(rank)) for rank in range(schedule.ranks)]  # by rank
    times = action_times(
        schedule.computations,
        schedule.stages,
        lambda action: cost[action.kind] / stage_counts[schedule.rank_of(action.stage)],
        latency,
    )
    step = max(end for _, end in times.values())
    work = sum(end - start for start, end in times.values())
    peaks = []
    for stages, row in zip(stage_counts, schedule.computations, strict=True):
        changes = [(a.kind is ActionKind.F) - (a.kind in (ActionKind.B, ActionKind.W)) for a in row]
        peaks.append(max(itertools.accumulate(changes)) / stages)
    return Timeline(times, step, 1 - work / (schedule.ranks * step), tuple(peaks))
