"""Table of what was gathered because no rule divides an operation: noted while a step runs, logged when it is over."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from lightning_parallel.collectives.elements import Ranks

log = logging.getLogger(__name__)


def note(ranks: Ranks, operation: str, own: Tensor, shape: torch.Size) -> None:
    """Note that an operation gets a whole tensor.

    Args:
        ranks: that divide it.
        operation: its name.
        own: what this rank has of it.
        shape: of the whole.
    """
    if torch.compiler.is_dynamo_compiling() or (ranks.told and (operation, shape) in ranks.told):
        return
    received = (shape.numel() - own.numel()) * own.element_size()
    times, total = ranks.gathered.get((operation, shape), (0, 0))
    ranks.gathered[operation, shape] = times + 1, total + received


def tell(ranks: Ranks) -> None:
    """Log what was gathered and not told before, on the first of the ranks, most bytes first."""
    if not ranks.gathered:
        return
    if ranks.rank == 0:
        most_first = sorted(ranks.gathered.items(), key=lambda row: -row[1][1])
        rows = [("operation", "shape", "times", "bytes")]
        rows += [(name, str(tuple(shape)), str(n), f"{received:,}") for (name, shape), (n, received) in most_first]
        name, shape, times, received = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [f"  {a:<{name}}  {b:<{shape}}  {c:>{times}}  {d:>{received}}" for a, b, c, d in rows]
        title = (
            f"Gathered from {ranks.count} ranks of {ranks.name}, as no rule divides the operation; "
            "bytes are those that a rank received in one step:"
        )
        log.info("\n".join([title, *lines]))
    ranks.told |= ranks.gathered.keys()
    ranks.gathered.clear()
