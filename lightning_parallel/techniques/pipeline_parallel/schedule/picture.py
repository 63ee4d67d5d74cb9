"""A schedule as a picture: ranks over time, what they compute and where they wait."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_parallel.techniques.pipeline_parallel.schedule.actions import ActionKind
from lightning_parallel.techniques.pipeline_parallel.schedule.simulate import Timed, Timeline
from lightning_parallel.techniques.tools import pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKS = {  # name, and a colour from the lightest to the darkest stage of a rank
    ActionKind.F: ("forward", ("#a9c8f0", "#2f6fbf")),
    ActionKind.B: ("backward", ("#a3dcc3", "#1d8a63")),
    ActionKind.I: ("input gradient", ("#fbd08a", "#d9800f")),
    ActionKind.W: ("weight gradient", ("#d3c0ec", "#7d52b8")),
}
BUBBLE, INK, QUIET = "#ececf0", "#1f2430", "#6b7280"
INCHES = {"cell": 0.19, "row": 0.42, "least": 8.0, "most": 16.0, "legend": 0.44}
MARGINS = {"left": 0.62, "right": 0.14, "top": 0.42, "bottom": 0.62}


def draw(timeline: Timeline, path: str | Path) -> None:
    """Writes the picture of a simulated schedule; the suffix of the path says in which format (.png, .svg, .pdf).

    Forward, backward, input gradient, weight gradient and bubble have their colours, the stages of a rank shades of
    them. Cells carry the number of the microbatch.

    Args:
        timeline: What to draw.
        path: Where to.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    ranks = len(timeline.rows)
    shortest = min(timed.end - timed.start for row in timeline.rows for timed in row if timed.end > timed.start)
    width = min(max(timeline.step / shortest * INCHES["cell"], INCHES["least"]), INCHES["most"])
    height = ranks * INCHES["row"] + MARGINS["top"] + MARGINS["bottom"]
    figure = pictures.figure(width, height)
    inside = width - MARGINS["left"] - MARGINS["right"], ranks * INCHES["row"]
    corner = MARGINS["left"] / width, MARGINS["bottom"] / height
    axes = figure.add_axes((*corner, inside[0] / width, inside[1] / height))
    inches_per_time = inside[0] / timeline.step
    for rank, row in enumerate(timeline.rows):
        axes.broken_barh([(0, timeline.step)], (rank - 0.42, 0.84), facecolors=BUBBLE)
        for timed in row:
            _draw_cell(axes, timeline, rank, timed, inches_per_time)
    _frame(axes, timeline)
    figure.savefig(path, dpi=110)


def _draw_cell(axes: Axes, timeline: Timeline, rank: int, timed: Timed, inches_per_time: float) -> None:
    action, length = timed.action, timed.end - timed.start
    mine = timeline.schedule.stages_of(rank)
    depth = mine.index(action.stage) / max(1, len(mine) - 1) if len(mine) > 1 else 0.35
    colour = _shade(action.kind, depth)
    axes.broken_barh(
        [(timed.start, length)], (rank - 0.42, 0.84), facecolors=[colour], edgecolors="white", linewidth=0.7
    )
    text = str(action.microbatch)
    size = min(8.5, 72 * length * inches_per_time / (0.75 * len(text) + 0.15))
    if size >= 4:
        ink = INK if depth < 0.6 else "white"
        middle = timed.start + length / 2
        axes.text(middle, rank, text, ha="center", va="center_baseline", fontsize=size, color=ink, clip_on=True)


def _shade(kind: ActionKind, depth: float) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    light, dark = (to_rgb(colour) for colour in LOOKS[kind][1])
    red, green, blue = (a + (b - a) * depth for a, b in zip(light, dark, strict=True))
    return red, green, blue


def _frame(axes: Axes, timeline: Timeline) -> None:
    schedule = timeline.schedule
    axes.set(xlim=(0, timeline.step), ylim=(schedule.ranks - 0.5, -0.5), yticks=range(schedule.ranks))
    axes.set_yticklabels([f"rank {rank}" for rank in range(schedule.ranks)], fontsize=9, color=INK)
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelsize=8, colors=QUIET)
    below = -1 / schedule.ranks * INCHES["legend"] / INCHES["row"]
    axes.text(1, below, "time", transform=axes.transAxes, ha="right", va="center", fontsize=8.5, color=QUIET)
    axes.spines[:].set_visible(False)
    axes.set_title(Path(schedule.name).stem, loc="left", fontsize=12, fontweight="bold", color=INK, pad=10)
    axes.set_title(summary(timeline), loc="right", fontsize=9, color=QUIET, pad=10)
    _legend(axes, timeline, below)


def summary(timeline: Timeline) -> str:
    """Size, bubble fraction and peak in one line."""
    schedule = timeline.schedule
    sizes = [(schedule.ranks, "rank"), (schedule.stages, "stage"), (schedule.microbatches, "microbatch")]
    if schedule.stages == schedule.ranks:
        del sizes[1]
    counted = " · ".join(f"{size} {what}{_plural(size, what)}" for size, what in sizes)
    return f"{counted} · bubble {100 * timeline.bubble:.1f} % · peak activations {max(timeline.peak_activations):g}"


def _plural(size: int, what: str) -> str:
    return "" if size == 1 else "es" if what.endswith("h") else "s"


def _legend(axes: Axes, timeline: Timeline, height: float) -> None:
    """One entry per kind of work; where ranks hold several stages, all their shades side by side."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    most = max(len(timeline.schedule.stages_of(rank)) for rank in range(timeline.schedule.ranks))
    depths = [0.35] if most == 1 else [local / (most - 1) for local in range(most)]
    used = {timed.action.kind for row in timeline.rows for timed in row}
    handles: list[Any] = [
        tuple(Patch(facecolor=_shade(kind, depth)) for depth in depths) for kind in LOOKS if kind in used
    ]
    names = [LOOKS[kind][0] for kind in LOOKS if kind in used]
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
