"""What was gathered for want of a rule: noted while a step runs, told as one table when it is over."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.plan.plan import starred

log = logging.getLogger(__name__)

FORWARD = "forward"


def note(ranks: Ranks, operation: str, own: Tensor, shape: torch.Size) -> None:
    """Notes that an operation gets a whole tensor.

    Args:
        ranks: that have it divided.
        operation: its name.
        own: what this rank has of it.
        shape: of the whole.
    """
    if torch.compiler.is_dynamo_compiling() or (ranks.told and (operation, shape) in ranks.told):
        return
    received = (shape.numel() - own.numel()) * own.element_size()
    times, total = ranks.gathered.get((_module(), operation, shape), (0, 0))
    ranks.gathered[_module(), operation, shape] = times + 1, total + received


def _module() -> nn.Module | None:
    """The module in whose forward this is called, as the frames tell."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == FORWARD else None
        if isinstance(owner, nn.Module):
            return owner
        frame = frame.f_back
    return None


def tell(ranks: Ranks, model: nn.Module) -> None:
    """Logs what was gathered and not told before, on the first of the ranks."""
    if not ranks.gathered:
        return
    if ranks.rank == 0:
        log.info("\n".join(table(ranks, model)))
    ranks.told |= {(operation, shape) for _, operation, shape in ranks.gathered}
    ranks.gathered.clear()


def table(ranks: Ranks, model: nn.Module) -> Iterator[str]:
    """The lines: for each operation and kind of module the bytes that this rank received, most first."""
    names = {id(module): starred(name) or type(module).__name__ for name, module in model.named_modules()}
    rows: dict[tuple[str, str, str], tuple[int, int]] = {}
    for (module, operation, shape), (times, received) in ranks.gathered.items():
        key = names.get(id(module), "the step"), operation, str(tuple(shape))
        rows[key] = rows.get(key, (0, 0))[0] + times, rows.get(key, (0, 0))[1] + received
    yield (
        f"Gathered from {ranks.count} ranks of {ranks.name}, as no rule divides the operation; "
        "bytes are those that a rank received in one step:"
    )
    most_first = sorted(rows.items(), key=lambda row: -row[1][1])
    cells = [(*key, str(times), f"{received:,}") for key, (times, received) in most_first]
    yield from _aligned([("in", "operation", "shape", "times", "bytes"), *cells])


def _aligned(lines: Iterable[tuple[str, ...]]) -> Iterator[str]:
    rows: list[Any] = list(lines)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        left = [f"{cell:<{width}}" for cell, width in zip(row[:3], widths, strict=False)]
        right = [f"{cell:>{width}}" for cell, width in zip(row[3:], widths[3:], strict=True)]
        yield "  " + "  ".join([*left, *right])
