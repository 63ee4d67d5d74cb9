"""A ring as a picture: for each step the scores that ranks compute, queries over keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_parallel.techniques.context_parallel.attention.blocks import Relation
from lightning_parallel.techniques.context_parallel.attention.course import Course, Meeting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2f6fbf", "#d9800f", "#1d8a63", "#7d52b8", "#b8433f", "#3a9fae", "#8a7322", "#c2579b")
"""Of ranks; more than these take them again."""
EMPTY, INK, QUIET = "#f3f3f6", "#1f2430", "#6b7280"
INCHES = {"panel": 2.5, "gap": 0.32, "left": 0.55, "right": 0.15, "top": 0.62, "bottom": 0.5}
PER_ROW = 4
STRIP = 0.035
"""The width of the strips that say who has a position, as a part of a panel."""


def draw(course: Course, path: str | Path) -> None:
    """Writes the picture; the suffix of the path says in which format (.png, .svg, .pdf).

    Each panel is a step. A rectangle has the colour of the rank that computes it: its queries from top to bottom, keys
    from left to right. Strips along the edges say who has which positions. What only a mask decides is lighter.

    Args:
        course: what to draw.
        path: where to.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    columns = min(course.ranks, PER_ROW)
    rows = -(-course.ranks // columns)
    side = INCHES["panel"] + INCHES["gap"]
    width = max(INCHES["left"] + columns * side + INCHES["right"], 9.0)
    height = INCHES["top"] + rows * side + INCHES["bottom"]
    figure = _figure(width, height)
    for step in range(course.ranks):
        left = INCHES["left"] + step % columns * side
        bottom = height - INCHES["top"] - INCHES["gap"] - INCHES["panel"] - step // columns * side
        axes = figure.add_axes((left / width, bottom / height, INCHES["panel"] / width, INCHES["panel"] / height))
        _draw_step(axes, course, step)
    _frame(figure, course, (width, height))
    figure.savefig(path, dpi=110)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "pictures are drawn by matplotlib, which is not installed: pip install 'lightning-parallel[recipes]'"
        ) from missing
    return Figure(figsize=(width, height), facecolor="white")


def _draw_step(axes: Axes, course: Course, step: int) -> None:
    size = course.size
    axes.set(xlim=(-STRIP * size, size), ylim=(size, -STRIP * size), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)
    axes.broken_barh([(0, size)], (0, size), facecolors=EMPTY)
    for meeting in course.meetings:
        if meeting.step == step:
            _draw_meeting(axes, meeting)
    for rank, runs in enumerate(course.runs):
        for start, stop in runs:
            axes.broken_barh([(start, stop - start)], (-STRIP * size, 0.8 * STRIP * size), facecolors=_colour(rank))
            axes.broken_barh([(-STRIP * size, 0.8 * STRIP * size)], (start, stop - start), facecolors=_colour(rank))
    what = "own keys" if step == 0 else f"keys of the rank {step} before"
    axes.set_title(f"step {step}: {what}", loc="left", fontsize=8.5, color=INK, pad=4)


def _draw_meeting(axes: Axes, meeting: Meeting) -> None:
    (top, bottom), (left, right) = meeting.queries, meeting.keys
    corners = [(left, top), (left, bottom), (right, bottom), (right, top)]
    if meeting.relation == Relation.DIAGONAL:
        del corners[3]
    alpha = 0.45 if meeting.relation == Relation.MASKED else 0.9
    axes.fill(
        [x for x, _ in corners], [y for _, y in corners], facecolor=_colour(meeting.rank), alpha=alpha,
        edgecolor="white", linewidth=0.8,
    )  # fmt: skip


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]


def _frame(figure: Figure, course: Course, inches: tuple[float, float]) -> None:
    from matplotlib.patches import Patch

    width, height = inches
    top = 1 - 0.16 / height
    left = INCHES["left"] / width
    title = f"ring · {course.name}"
    figure.text(left, top, title, fontsize=12, fontweight="bold", color=INK, va="top")
    figure.text(left, top - 0.26 / height, summary(course), fontsize=9, color=QUIET, va="top")
    right = 1 - INCHES["right"] / width
    along = "queries from top to bottom, keys from left to right"
    figure.text(right, 0.16 / height, along, fontsize=8.5, color=QUIET, ha="right", va="center")
    handles = [Patch(facecolor=_colour(rank)) for rank in range(course.ranks)]
    names = [f"rank {rank}" for rank in range(course.ranks)]
    if any(meeting.relation == Relation.MASKED for meeting in course.meetings):
        handles.append(Patch(facecolor=INK, alpha=0.3))
        names.append("lighter: the mask decides")
    figure.legend(
        handles, names, loc="lower left", bbox_to_anchor=(left, 0.08 / height), bbox_transform=figure.transFigure,
        ncols=min(len(names), 9), frameon=False, fontsize=8.5, labelcolor=INK, handlelength=1.1, handleheight=1.0,
        columnspacing=1.4, borderaxespad=0, borderpad=0,
    )  # fmt: skip


def summary(course: Course) -> str:
    """Sizes, the balance of work and what is sent, in one line."""
    scores = [sum(course.scores(rank, step) for step in range(course.ranks)) for rank in range(course.ranks)]
    balance, computed = max(scores) * course.ranks / sum(scores), sum(scores) / course.size**2
    parts = [f"{course.ranks} rank{'s' * (course.ranks > 1)}", f"{course.size} positions"]
    parts += [f"scores max/mean {balance:.2f}", f"{100 * computed:.0f} % of all scores computed"]
    if course.ranks > 1:
        sent = sum(map(course.sent, range(course.ranks))) / ((course.ranks - 1) * course.size)
        parts.append(f"{100 * sent:.0f} % of keys and values sent")
    return " · ".join(parts)
