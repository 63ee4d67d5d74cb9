"""Shows a schedule of pipeline parallel: `lightning-parallel schedule 1f1b --ranks 4 --microbatches 8`.

`python -m lightning_parallel.schedule` is the same.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_parallel.arguments import run_command
from lightning_parallel.techniques.pipeline_parallel.schedule.picture import draw
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import (
    SCHEDULES,
    Schedule,
    file_sizes,
    is_file,
    make_schedule,
)
from lightning_parallel.techniques.pipeline_parallel.schedule.simulate import Cost, Timeline, simulate

PROGRAM = "python -m lightning_parallel.schedule"


def parser(prog: str = PROGRAM) -> argparse.ArgumentParser:
    """The command line, under the name by which it was called."""
    line = argparse.ArgumentParser(
        prog=prog,
        description="Prints a pipeline schedule as a grid, with its bubble and its peak activations; draws it as well.",
    )
    line.add_argument("schedule", help=f"one of {', '.join(SCHEDULES)}, or the path of a .csv file")
    line.add_argument("--ranks", type=int, help="ranks of the pipeline")
    line.add_argument("--stages", type=int, help="stages over all ranks, instead of --ranks")
    line.add_argument("--microbatches", type=int, help="microbatches of a batch")
    line.add_argument("--stages-per-rank", type=int, help="stages that each rank holds; default: the schedule's own")
    line.add_argument(
        "--costs",
        type=cost,
        default=Cost(),
        metavar="F,I,W",
        help="time of forward, input gradient and weight gradient of one rank's layers for one microbatch "
        "(default: 1,1,1; a full backward takes I + W)",
    )
    line.add_argument("--latency", type=float, default=0.0, help="time of a message between two ranks (default: 0)")
    line.add_argument("--csv", type=Path, help="write the schedule to this file")
    line.add_argument("--png", type=Path, help="draw the timeline to this file (.png, .svg or .pdf)")
    return line


def cost(text: str) -> Cost:
    """Three times, separated by commas."""
    try:
        forward, input_gradient, weight_gradient = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers F,I,W, as in 1,1,1") from None
    return Cost(forward, input_gradient, weight_gradient)


def schedule_of(line: argparse.Namespace) -> Schedule:
    """The schedule that the command line asks for.

    Raises:
        ValueError: Sizes are missing or contradict each other, or break the schedule's rule.
    """
    name, v = line.schedule, line.stages_per_rank
    ranks, microbatches = line.ranks, line.microbatches
    if is_file(name):
        found = file_sizes(name)
        ranks, microbatches = ranks or found[0], microbatches or found[1]
    elif line.stages is not None:
        v = v or (SCHEDULES[name].stages_per_rank if name in SCHEDULES else 1)
        ranks = ranks or _ranks(name, line.stages, v)
    if ranks is None or microbatches is None:
        raise ValueError(f"the size of {name} is missing; give --ranks (or --stages) and --microbatches")
    schedule = make_schedule(name, ranks, microbatches, v)
    if line.stages not in (None, schedule.stages):
        raise ValueError(
            f"--stages {line.stages} contradicts {schedule.ranks} ranks with {schedule.stages} stages; leave it out"
        )
    return schedule


def _ranks(name: str, stages: int, v: int) -> int:
    if stages % v:
        raise ValueError(
            f"{name} with {v} stages per rank needs a multiple of {v} stages, {stages} is none; give --ranks instead"
        )
    return stages // v


def report(timeline: Timeline) -> str:
    """Grid, bubble and peak as text."""
    schedule = timeline.schedule
    split = ", backward split into I and W" if schedule.splits_backward else ""
    sizes = f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches{split}"
    return "\n".join(
        [
            f"{schedule.name}: {sizes}",
            "",
            schedule.grid(),
            "",
            f"step              {timeline.step:g}, of which {timeline.step * (1 - timeline.bubble):g} without waiting",
            f"bubble            {100 * timeline.bubble:.1f} %",
            f"peak activations  {' '.join(f'{peak:g}' for peak in timeline.peak_activations)}"
            "  (per rank, in microbatches of all its layers)",
        ]
    )


def show(line: argparse.Namespace) -> None:
    """Prints, writes and draws what the command line asks for."""
    schedule = schedule_of(line)
    per_rank = [len(schedule.stages_of(schedule.rank_of(stage))) for stage in range(schedule.stages)]
    timeline = simulate(schedule, [line.costs / stages for stages in per_rank], line.latency)
    print(report(timeline))
    if line.csv:
        line.csv.write_text(schedule.csv())
    if line.png:
        draw(timeline, line.png)


def main(arguments: Sequence[str] | None = None, prog: str = PROGRAM) -> None:
    """Runs the command."""
    run_command(parser(prog), arguments, show)


if __name__ == "__main__":
    main()
