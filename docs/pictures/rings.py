"""Draws ring attention: for each step the scores that ranks compute, queries over keys.

python docs/pictures/rings.py            # ring_*.png in this folder, as the documents show them
python docs/pictures/rings.py FOLDER     # in another one
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from lightning_parallel.collectives.spans import Runs, Span, bounds
from lightning_parallel.techniques.context_parallel.blocks import Relation, Table, block_of, causal_table, encode_table

RANKS, POSITIONS, DOCUMENTS = 4, 64, (20, 8, 24, 12)
COLORS = ("#2f6fbf", "#d9800f", "#1d8a63", "#7d52b8")
EMPTY, INK, QUIET = "#f3f3f6", "#1f2430", "#6b7280"
INCHES = {"panel": 2.5, "gap": 0.32, "left": 0.55, "right": 0.15, "top": 0.94, "bottom": 0.5}
STRIP = 0.035
"""The width of the strips that show whose a position is, as a part of a panel."""


def zigzag() -> list[Runs]:
    """Positions of each rank: a chunk from the front and one from the back."""
    pairs = [(rank, 2 * RANKS - 1 - rank) for rank in range(RANKS)]
    return [tuple(bounds(POSITIONS, 2 * RANKS, number) for number in pair) for pair in pairs]


def tables(runs: list[Runs], mask: Tensor | None) -> list[list[Table]]:
    """The relations of queries to keys, for each two ranks."""
    if mask is None:
        return [[causal_table(queries, keys) for keys in runs] for queries in runs]

    def table(queries: Runs, keys: Runs) -> Table:
        rows = torch.cat([mask[start:stop] for start, stop in queries])
        codes = encode_table(rows[None, None], queries, keys)[1:].view(len(queries), len(keys))
        return [[Relation(code) for code in row] for row in codes.tolist()]

    return [[table(queries, keys) for keys in runs] for queries in runs]


def draw(name: str, mask: Tensor | None, path: Path) -> None:
    """Write the picture. Each panel is a step; a rectangle has the color of the rank that computes it."""
    runs = zigzag()
    relations = tables(runs, mask)
    width = INCHES["left"] + RANKS * (INCHES["panel"] + INCHES["gap"]) + INCHES["right"]
    height = INCHES["top"] + INCHES["panel"] + INCHES["bottom"]
    figure = Figure(figsize=(width, height), facecolor="white")
    for step in range(RANKS):
        left = INCHES["left"] + step * (INCHES["panel"] + INCHES["gap"])
        place = left / width, INCHES["bottom"] / height, INCHES["panel"] / width, INCHES["panel"] / height
        axes = figure.add_axes(place)
        frame_step(axes, runs, step)
        for rank in range(RANKS):
            other = (rank - step) % RANKS
            for queries, row in zip(runs[rank], relations[rank][other], strict=True):
                for keys, relation in zip(runs[other], row, strict=True):
                    draw_rectangle(axes, rank, queries, keys, relation)
    left, top = INCHES["left"] / width, 1 - 0.16 / height
    figure.text(left, top, f"ring · {name}", fontsize=12, fontweight="bold", color=INK, va="top")
    figure.text(left, top - 0.26 / height, summary(runs, relations), fontsize=9, color=QUIET, va="top")
    handles = [Patch(facecolor=color) for color in COLORS]
    names = [f"rank {rank}" for rank in range(RANKS)]
    if mask is not None:
        handles.append(Patch(facecolor=INK, alpha=0.3))
        names.append("lighter: the mask decides")
    figure.legend(
        handles, names, loc="lower left", bbox_to_anchor=(left, 0.08 / height), bbox_transform=figure.transFigure,
        ncols=len(names), frameon=False, fontsize=8.5, labelcolor=INK, handlelength=1.1, handleheight=1.0,
        columnspacing=1.4, borderaxespad=0, borderpad=0,
    )  # fmt: skip
    along, right = "queries from top to bottom, keys from left to right", 1 - INCHES["right"] / width
    figure.text(right, 0.16 / height, along, fontsize=8.5, color=QUIET, ha="right", va="center")
    figure.savefig(path, dpi=110)


def frame_step(axes: Axes, runs: list[Runs], step: int) -> None:
    """Draw the panel of a step without its rectangles."""
    size, strip = POSITIONS, STRIP * POSITIONS
    axes.set(xlim=(-strip, size), ylim=(size, -strip), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)
    axes.broken_barh([(0, size)], (0, size), facecolors=EMPTY)
    for color, spans in zip(COLORS, runs, strict=True):
        for start, stop in spans:
            axes.broken_barh([(start, stop - start)], (-strip, 0.8 * strip), facecolors=color)
            axes.broken_barh([(-strip, 0.8 * strip)], (start, stop - start), facecolors=color)
    what = "own keys" if step == 0 else f"keys of the rank {step} before"
    axes.set_title(f"step {step}: {what}", loc="left", fontsize=8.5, color=INK, pad=4)


def draw_rectangle(axes: Axes, rank: int, queries: Span, keys: Span, relation: Relation) -> None:
    """Draw the scores of two spans: a triangle on the diagonal, lighter where only the mask decides."""
    if relation == Relation.NOTHING:
        return
    (top, bottom), (left, right) = queries, keys
    corners = [(left, top), (left, bottom), (right, bottom), (right, top)]
    if relation == Relation.DIAGONAL:
        del corners[3]
    alpha = 0.45 if relation == Relation.MASKED else 0.9
    xs, ys = zip(*corners, strict=True)
    axes.fill(xs, ys, facecolor=COLORS[rank], alpha=alpha, edgecolor="white", linewidth=0.8)


def summary(runs: list[Runs], relations: list[list[Table]]) -> str:
    """Sizes, the balance of work and what is sent, in one line."""
    blocks = [
        [block_of(runs[rank], runs[other], relations[rank][other]) for other in range(RANKS)] for rank in range(RANKS)
    ]
    scores = [sum(piece.scores for block in row for piece in block.pieces) for row in blocks]
    sent = sum(block.length for rank, row in enumerate(blocks) for other, block in enumerate(row) if rank != other)
    return (
        f"{RANKS} ranks · {POSITIONS} positions · scores max/mean {max(scores) * RANKS / sum(scores):.2f} · "
        f"{100 * sum(scores) / POSITIONS**2:.0f} % of all scores computed · "
        f"{100 * sent / ((RANKS - 1) * POSITIONS):.0f} % of keys and values sent"
    )


def main(folder: Path) -> None:
    """Draw the pictures into the folder."""
    ids = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
    packed = (ids[:, None] == ids) & torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).tril()
    draw("causal", None, folder / "ring_causal.png")
    draw(f"documents:{','.join(map(str, DOCUMENTS))}", packed, folder / "ring_documents.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
