"""Print a schedule of pipeline parallelism: `lightning-parallel schedule 1f1b --ranks 4 --microbatches 8`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_parallel.techniques.pipeline_parallel.schedule import schedules
from lightning_parallel.techniques.pipeline_parallel.schedule.simulate import simulate


def costs(text: str) -> tuple[float, float, float]:
    """Parse three times, separated by commas."""
    try:
        forward, input_gradient, weight_gradient = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers F,I,W, as in 1,1,1") from None
    return forward, input_gradient, weight_gradient


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the schedule's grid, bubble and peak activations, and write its CSV file if `--csv` is given.

    Wrong or missing arguments end the program with a message, as argparse does.
    """
    command = argparse.ArgumentParser(
        prog="lightning-parallel schedule",
        description="Prints a pipeline schedule as a grid, with its bubble and its peak activations.",
    )
    add, times = command.add_argument, "times of F, I and W of one rank's layers for one microbatch"
    add("schedule", help=f"one of {', '.join(schedules.SCHEDULES)}, or the path of a .csv file")
    add("--ranks", type=int, help="ranks of the pipeline")
    add("--microbatches", type=int, help="microbatches of a batch")
    add("--stages-per-rank", type=int, help="stages that each rank holds; default: the schedule's own")
    times += " (default: 1,1,1; B takes I + W)"
    add("--costs", type=costs, default=(1.0, 1.0, 1.0), metavar="F,I,W", help=times)
    add("--latency", type=float, default=0.0, help="time of a message between two ranks (default: 0)")
    add("--csv", type=Path, help="write the schedule to this file")
    line = command.parse_args(arguments)
    name, ranks, microbatches = line.schedule, line.ranks, line.microbatches
    try:
        if schedules.is_file(name):
            read = schedules.read_csv(name)
            ranks, microbatches = ranks or read.ranks, microbatches or read.microbatches
        if ranks is None or microbatches is None:
            raise ValueError(f"the size of {name} is missing; give --ranks and --microbatches")
        schedule = schedules.make_schedule(name, ranks, microbatches, line.stages_per_rank)
        timeline = simulate(schedule, line.costs, line.latency)
        split = ", backward split into I and W" if schedule.splits_backward else ""
        peaks = " ".join(f"{peak:g}" for peak in timeline.peak_activations)
        working = timeline.step * (1 - timeline.bubble)
        print(f"{name}: {ranks} ranks, {schedule.stages} stages, {microbatches} microbatches{split}\n")
        print(f"{schedule.grid()}\n")
        print(f"step              {timeline.step:g}, of which {working:g} without waiting")
        print(f"bubble            {100 * timeline.bubble:.1f} %")
        print(f"peak activations  {peaks}  (per rank, in microbatches of all its layers)")
        if line.csv:
            line.csv.write_text(schedule.csv())
    except (ValueError, ModuleNotFoundError, OSError) as problem:
        command.error(str(problem))
