"""Who writes what: every box of every tensor once, spread evenly over the ranks that hold it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from math import prod

from lightning_parallel.checkpoint.manifest import Place, Table
from lightning_parallel.checkpoint.tensors_file import DTYPES

Span = tuple[tuple[int, ...], tuple[int, ...]]
"""One box that a rank holds of a tensor: its first element in the full tensor, and its shape."""


@dataclass(frozen=True)
class Offer:
    """The tensors that one rank could write.

    Attributes:
        shapes: dtype and full shape of each tensor that it knows of, also where another rank holds it.
        boxes: of each tensor what it holds of it.
        same: of tensors that are another one, the name of that; it counts where all ranks say so.
    """

    shapes: Mapping[str, tuple[str, tuple[int, ...]]]
    boxes: Mapping[str, Sequence[Span]]
    same: Mapping[str, str]


@dataclass(frozen=True)
class Shares:
    """The boxes that the ranks write together."""

    tensors: dict[str, Table]
    same: dict[str, str]


def shared_out(offers: Sequence[Offer]) -> Shares:
    """Divide what ranks hold among them; the names are those of the first rank.

    Raises:
        ValueError: ranks hold different things under one name, or together not the whole of it.
    """
    first = offers[0]
    same = {
        name: other
        for name, other in first.same.items()
        if other in first.shapes and all(offer.same.get(name) == other for offer in offers)
    }
    tensors: dict[str, Table] = {}
    written = [0] * len(offers)  # bytes that each rank writes
    for name, (dtype, shape) in first.shapes.items():
        if name in same:
            continue
        _require_alike(name, offers)
        holders = _disjoint([offer.boxes.get(name, ()) for offer in offers])
        held = sum(prod(size) for _, size in holders)
        if held != prod(shape):
            raise ValueError(f"{name} has {prod(shape)} elements in the checkpoint of rank 0, and ranks hold {held}")
        places = []
        for (offset, size), ranks in holders.items():
            rank = min(ranks, key=written.__getitem__)
            written[rank] += prod(size) * DTYPES[dtype].itemsize
            places.append(Place(rank, offset, size))
        tensors[name] = Table(dtype, shape, tuple(places))
    return Shares(tensors, same)


def _require_alike(name: str, offers: Sequence[Offer]) -> None:
    found = {offer.shapes[name]: rank for rank, offer in reversed(list(enumerate(offers))) if name in offer.shapes}
    if len(found) > 1:
        told = "; ".join(f"rank {rank}: {dtype} of {shape}" for (dtype, shape), rank in found.items())
        raise ValueError(f"{name} is not the same tensor on all ranks ({told}); hooks must change it on all alike")


def _disjoint(spans: Sequence[Sequence[Span]]) -> dict[Span, list[int]]:
    """Return boxes of which no two overlap, with the ranks that hold each.

    Where any overlap, as the full tensor of one rank and the half of another, all are cut wherever a box ends.
    """
    known = {span for some in spans for span in some}
    cuts = [
        sorted({end for first, length in sides for end in (first, first + length)})
        for sides in zip(*(list(zip(*span, strict=True)) for span in known), strict=True)
    ]
    pieces = {span: _pieces(span, cuts) for span in known}
    overlap = len(set(chain.from_iterable(pieces.values()))) < sum(map(len, pieces.values()))
    holders: dict[Span, list[int]] = {}
    for rank, some in enumerate(spans):
        for span in some:
            for piece in pieces[span] if overlap else [span]:
                holders.setdefault(piece, []).append(rank)
    return holders


def _pieces(span: Span, cuts: Sequence[Sequence[int]]) -> list[Span]:
    sides = []
    for start, size, ends in zip(*span, cuts, strict=True):
        inside = ends[bisect_left(ends, start) : bisect_right(ends, start + size)]
        sides.append([(first, last - first) for first, last in pairwise(inside)])
    return [(tuple(first for first, _ in it), tuple(size for _, size in it)) for it in product(*sides)]
