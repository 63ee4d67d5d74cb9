"""Shows who attends to what in which step of a ring: `lightning-parallel ring --ranks 4 --positions 64`.

`python -m lightning_parallel.ring` is the same.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_parallel.arguments import run_command
from lightning_parallel.techniques.context_parallel.attention.course import Course, course
from lightning_parallel.techniques.context_parallel.attention.picture import draw, summary

PROGRAM = "python -m lightning_parallel.ring"


def parser(prog: str = PROGRAM) -> argparse.ArgumentParser:
    """The command line, under the name by which it was called."""
    line = argparse.ArgumentParser(
        prog=prog,
        description="Prints the steps of ring attention: whose keys a rank has, and how many scores it computes; draws "
        "them as well.",
    )
    line.add_argument("--ranks", type=int, required=True, help="ranks of the ring")
    line.add_argument("--positions", type=int, default=64, help="of the sequence (default: 64)")
    line.add_argument(
        "--mask",
        default="causal",
        help="causal (default), full, window:N for each position and the N - 1 before it, or documents:A,B,... for "
        "packed documents of these lengths",
    )
    line.add_argument("--contiguous", action="store_true", help="one chunk for each rank, instead of a zigzag")
    line.add_argument("--png", type=Path, help="draw the steps to this file (.png, .svg or .pdf)")
    return line


def report(shown: Course) -> str:
    """Steps, work and messages as text."""
    steps = range(shown.ranks)
    rows = [["", *(f"step {step}" for step in steps), "scores", "sent"]]
    for rank in range(shown.ranks):
        scores = [shown.scores(rank, step) for step in steps]
        cells = [
            f"{shown.other(rank, step)}: {found}" if found else "-" for step, found in zip(steps, scores, strict=True)
        ]
        rows.append([f"rank {rank}", *cells, str(sum(scores)), str(shown.sent(rank))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    legend = "s: n   in this step the rank has the keys of rank s, and computes n scores; -: nothing meets"
    sent = "sent   keys and values that the rank sends in all, counted in positions"
    return "\n".join([f"ring, {shown.name}: {summary(shown)}", "", *table, "", legend, sent])


def show(line: argparse.Namespace) -> None:
    """Prints, and draws, what the command line asks for."""
    shown = course(line.ranks, line.positions, line.mask, not line.contiguous)
    print(report(shown))
    if line.png:
        draw(shown, line.png)


def main(arguments: Sequence[str] | None = None, prog: str = PROGRAM) -> None:
    """Runs the command."""
    run_command(parser(prog), arguments, show)


if __name__ == "__main__":
    main()
