"""Divided tensors on their way from one stage of a pipeline to the next: a rank sends what it has, not the whole.

The rank that receives a parcel has the same place among the ranks that divide, so its elements are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_parallel.collectives.elements import Elements, Ranks
from lightning_parallel.collectives.spans import Runs
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.values import map_kind


@dataclass
class Parcel:
    """A rank's own elements, and by dimensions which they are.

    Attributes:
        own: the elements.
        cuts: for each divided dimension the name of the ranks that divide it, its size, and the spans of each rank.
    """

    own: Tensor
    cuts: dict[int, tuple[str, int, tuple[Runs, ...]]]


def packed(value: Any) -> Any:
    """The value with parcels in place of divided tensors."""
    return map_kind(Divided, lambda each: Parcel(each.own, {k: _told(e) for k, e in each.cuts.items()}), value)


def unpacked(value: Any, ranks: Ranks) -> Any:
    """The value with divided tensors in place of parcels, as far as these ranks divide them."""
    return map_kind(Parcel, lambda parcel: _unpacked(parcel, ranks), value)


def _unpacked(parcel: Parcel, ranks: Ranks) -> Any:
    """A tensor that other ranks divide too stays a parcel, of divided elements, until these unpack it."""
    mine = {k: ranks.elements(size, runs) for k, (name, size, runs) in parcel.cuts.items() if name == ranks.name}
    others = {k: cut for k, cut in parcel.cuts.items() if k not in mine}
    own, before = (parcel.own.own, dict(parcel.own.cuts)) if isinstance(parcel.own, Divided) else (parcel.own, {})
    made = Divided(own, before | mine) if before | mine else own
    return Parcel(made, others) if others else made


def _told(elements: Elements) -> tuple[str, int, tuple[Runs, ...]]:
    return elements.ranks.name, elements.size, elements.runs
