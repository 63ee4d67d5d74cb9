"""The time that a schedule takes and the activations that it keeps, computed from the costs of stages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_parallel.techniques.pipeline_parallel.schedule.actions import Action, ActionKind, run
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import Schedule


@dataclass(frozen=True)
class Cost:
    """Costs of one microbatch on a stage, in any unit of time; a full backward takes both gradients' time.

    Args:
        forward: F.
        input_gradient: I.
        weight_gradient: W.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0

    def of(self, kind: ActionKind) -> float:
        """The time of a computation."""
        return {
            ActionKind.F: self.forward,
            ActionKind.B: self.input_gradient + self.weight_gradient,
            ActionKind.I: self.input_gradient,
            ActionKind.W: self.weight_gradient,
        }[kind]

    def __truediv__(self, parts: float) -> "Cost":
        return Cost(self.forward / parts, self.input_gradient / parts, self.weight_gradient / parts)


@dataclass(frozen=True)
class Timed:
    """An action and when it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time.

    Args:
        schedule: The schedule.
        rows: Per rank its computations, in order.
    """

    schedule: Schedule
    rows: tuple[tuple[Timed, ...], ...]

    @cached_property
    def step(self) -> float:
        """The time at which the last rank is done."""
        return max(row[-1].end for row in self.rows)

    @cached_property
    def bubble(self) -> float:
        """The idle share of the ranks' time: 1 - ideal / step, the ideal being the work divided evenly over ranks.

        Where stages cost alike this is the bubble fraction of the literature; where they do not, the slower ranks'
        lead counts as well.
        """
        work = sum(timed.end - timed.start for row in self.rows for timed in row)
        return 1 - work / (len(self.rows) * self.step)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Per rank the most microbatches whose activations it keeps at a time, in units of all its layers.

        A stage keeps a microbatch from F until B is done, or until W if the backward is split; a rank with v stages
        counts each as 1 / v.
        """
        return tuple(self._peak(rank) for rank in range(len(self.rows)))

    def _peak(self, rank: int) -> float:
        live = most = 0
        for timed in self.rows[rank]:
            live += (timed.action.kind is ActionKind.F) - (timed.action.kind in (ActionKind.B, ActionKind.W))
            most = max(most, live)
        return most / len(self.schedule.stages_of(rank))


def simulate(schedule: Schedule, costs: Cost | Sequence[Cost] = Cost(), latency: float = 0.0) -> Timeline:
    """Runs the schedule in thought: every rank computes in its order, each action as early as it can.

    Args:
        schedule: The schedule.
        costs: Of every stage, or one for all.
        latency: How long an activation or a gradient travels to another rank; the ranks compute meanwhile.

    Raises:
        ValueError: There is not one cost per stage, or a time is negative.
    """
    per_stage = [costs] * schedule.stages if isinstance(costs, Cost) else list(costs)
    if len(per_stage) != schedule.stages:
        raise ValueError(
            f"{len(per_stage)} costs were given for {schedule.stages} stages; give one per stage, or one for all"
        )
    times = [latency] + [
        time for cost in per_stage for time in (cost.forward, cost.input_gradient, cost.weight_gradient)
    ]
    if not all(0 <= time < math.inf for time in times) or not any(times[1:]):
        shown = ", ".join(f"{time:g}" for time in dict.fromkeys(times))
        raise ValueError(f"the times {shown} make no timeline; give finite costs above 0 and no negative latency")
    done = run(
        schedule.computations,
        schedule.stages,
        cost=lambda action: per_stage[action.stage].of(action.kind),
        latency=latency,
    )
    return Timeline(schedule, tuple(tuple(Timed(a, *done[a]) for a in row) for row in schedule.computations))
