"""Draws the schedules of pipeline parallel: ranks over time, with computations and waits.

python docs/pictures/schedules.py            # schedule_*.png in this folder, as the documents show them
python docs/pictures/schedules.py FOLDER     # in another one
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from lightning_parallel.techniques.pipeline_parallel.schedule.actions import Action, ActionKind
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import SCHEDULES, Schedule, make_schedule
from lightning_parallel.techniques.pipeline_parallel.schedule.simulate import Timeline, simulate

RANKS, MICROBATCHES = 4, 8
COLORS = {  # name, and a color from the lightest to the darkest stage of a rank
    ActionKind.F: ("forward", ("#a9c8f0", "#2f6fbf")),
    ActionKind.B: ("backward", ("#a3dcc3", "#1d8a63")),
    ActionKind.I: ("input gradient", ("#fbd08a", "#d9800f")),
    ActionKind.W: ("weight gradient", ("#d3c0ec", "#7d52b8")),
}
BUBBLE, INK, QUIET = "#ececf0", "#1f2430", "#6b7280"
INCHES = {"cell": 0.19, "row": 0.42, "least": 8.0, "most": 16.0, "legend": 0.44}
MARGINS = {"left": 0.62, "right": 0.14, "top": 0.42, "bottom": 0.62}


def draw(schedule: Schedule, path: Path) -> None:
    """Write the picture of a schedule. Cells carry the number of the microbatch."""
    timeline = simulate(schedule)
    shortest = min(end - start for start, end in timeline.times.values())
    width = min(max(timeline.step / shortest * INCHES["cell"], INCHES["least"]), INCHES["most"])
    height = schedule.ranks * INCHES["row"] + MARGINS["top"] + MARGINS["bottom"]
    inside = width - MARGINS["left"] - MARGINS["right"], schedule.ranks * INCHES["row"]
    corner = MARGINS["left"] / width, MARGINS["bottom"] / height
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((*corner, inside[0] / width, inside[1] / height))
    for rank in range(schedule.ranks):
        axes.broken_barh([(0, timeline.step)], (rank - 0.42, 0.84), facecolors=BUBBLE)
    for action, (start, end) in timeline.times.items():
        _draw_cell(axes, schedule, action, start, end - start, inside[0] / timeline.step)
    _frame(axes, schedule, timeline)
    figure.savefig(path, dpi=110)


def _draw_cell(
    axes: Axes, schedule: Schedule, action: Action, start: float, length: float, inches_per_time: float
) -> None:
    rank = schedule.rank_of(action.stage)
    stages = schedule.stages_of(rank)
    depth = stages.index(action.stage) / (len(stages) - 1) if len(stages) > 1 else 0.35
    color = _shade(action.kind, depth)
    axes.broken_barh([(start, length)], (rank - 0.42, 0.84), facecolors=[color], edgecolors="white", linewidth=0.7)
    text = str(action.microbatch)
    size = min(8.5, 72 * length * inches_per_time / (0.75 * len(text) + 0.15))
    ink = INK if depth < 0.6 else "white"
    axes.text(start + length / 2, rank, text, ha="center", va="center_baseline", fontsize=size, color=ink, clip_on=True)


def _shade(kind: ActionKind, depth: float) -> tuple[float, float, float]:
    light, dark = (to_rgb(color) for color in COLORS[kind][1])
    red, green, blue = (a + (b - a) * depth for a, b in zip(light, dark, strict=True))
    return red, green, blue


def _frame(axes: Axes, schedule: Schedule, timeline: Timeline) -> None:
    axes.set(xlim=(0, timeline.step), ylim=(schedule.ranks - 0.5, -0.5), yticks=range(schedule.ranks))
    axes.set_yticklabels([f"rank {rank}" for rank in range(schedule.ranks)], fontsize=9, color=INK)
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelsize=8, colors=QUIET)
    below = -1 / schedule.ranks * INCHES["legend"] / INCHES["row"]
    axes.text(1, below, "time", transform=axes.transAxes, ha="right", va="center", fontsize=8.5, color=QUIET)
    axes.spines[:].set_visible(False)
    stages = "" if schedule.stages == schedule.ranks else f" · {schedule.stages} stages"
    figures = f"bubble {100 * timeline.bubble:.1f} % · peak activations {max(timeline.peak_activations):g}"
    summary = f"{schedule.ranks} ranks{stages} · {schedule.microbatches} microbatches · {figures}"
    axes.set_title(schedule.name, loc="left", fontsize=12, fontweight="bold", color=INK, pad=10)
    axes.set_title(summary, loc="right", fontsize=9, color=QUIET, pad=10)
    _legend(axes, schedule, below)


def _legend(axes: Axes, schedule: Schedule, height: float) -> None:
    """One entry per kind of computation; if ranks hold several stages, with all their shades side by side."""
    most = schedule.stages // schedule.ranks
    depths = [0.35] if most == 1 else [number / (most - 1) for number in range(most)]
    used = {action.kind for row in schedule.computations for action in row}
    handles: list[Any] = [
        tuple(Patch(facecolor=_shade(kind, depth)) for depth in depths) for kind in COLORS if kind in used
    ]
    names = [COLORS[kind][0] for kind in COLORS if kind in used]
    if most > 1:
        names[0] += f" (first to last of a rank's {most} stages)"
    axes.legend(
        [*handles, Patch(facecolor=BUBBLE)],
        [*names, "bubble"],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="center left",
        bbox_to_anchor=(0, height),
        ncols=len(names) + 1,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=1.1 * len(depths),
        handleheight=1.0,
        columnspacing=1.6,
        borderaxespad=0,
        borderpad=0,
    )


def main(folder: Path) -> None:
    """Draw all schedules into the folder."""
    for name in SCHEDULES:
        draw(make_schedule(name, RANKS, MICROBATCHES), folder / f"schedule_{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
