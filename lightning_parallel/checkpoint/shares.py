"""Who writes what: every box of every tensor once, spread over the ranks that hold it by torch's own planner."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, product
from math import prod
from typing import TYPE_CHECKING

import torch

from lightning_parallel.checkpoint.manifest import Place, Table
from lightning_parallel.checkpoint.tensors_file import DTYPES

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

Offsets = tuple[int, ...]
Span = tuple[Offsets, tuple[int, ...]]
"""One box that a rank holds of a tensor: its first element in the whole, and its shape."""


@dataclass(frozen=True)
class Offer:
    """The tensors that one rank could write.

    Attributes:
        shapes: dtype and whole shape of each tensor that it knows of, also where another rank holds it.
        boxes: of each tensor what it holds of it.
        same: of tensors that are another one, the name of that; it counts where all ranks say so.
    """

    shapes: Mapping[str, tuple[str, tuple[int, ...]]]
    boxes: Mapping[str, Sequence[Span]]
    same: Mapping[str, str]


@dataclass(frozen=True)
class Shares:
    """What the ranks write together."""

    tensors: dict[str, Table]
    same: dict[str, str]


def shared_out(offers: Sequence[Offer]) -> Shares:
    """Divides what ranks hold among them; the names are those of the first rank.

    Raises:
        ValueError: ranks hold different things under one name, or together not the whole of it.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # not before a checkpoint needs it

    first = offers[0]
    same = {
        name: other
        for name, other in first.same.items()
        if other in first.shapes and all(offer.same.get(name) == other for offer in offers)
    }
    names = [name for name in first.shapes if name not in same]
    _require_alike(names, offers)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plans, _ = planner.create_global_plan([_plan_of(offer) for offer in _disjoint(offers, names)])
    boxes: dict[str, list[Place]] = {name: [] for name in names}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            boxes[item.index.fqn].append(Place(rank, tuple(chunk.offsets), tuple(chunk.sizes)))
    tensors = {name: Table(*first.shapes[name], tuple(boxes[name])) for name in names}
    if held := [name for name, table in tensors.items() if not table.boxes and 0 not in table.shape]:
        raise ValueError(f"{held[0]} is in the checkpoint of rank 0, and no rank holds its values")
    return Shares(tensors, same)


def _require_alike(names: Collection[str], offers: Sequence[Offer]) -> None:
    for name in names:
        found = {offer.shapes[name]: rank for rank, offer in reversed(list(enumerate(offers))) if name in offer.shapes}
        if len(found) > 1:
            told = "; ".join(f"rank {rank}: {dtype} of {shape}" for (dtype, shape), rank in found.items())
            raise ValueError(f"{name} is not the same tensor on all ranks ({told}); hooks must change it on all alike")


def _disjoint(offers: Sequence[Offer], names: Collection[str]) -> list[Offer]:
    """Offers of the same elements, in boxes of which any two are one or have nothing in common."""
    boxes: list[dict[str, Sequence[Span]]] = [{} for _ in offers]
    for name in names:
        spans = [offer.boxes.get(name, ()) for offer in offers]
        known = set(chain.from_iterable(spans))
        if sum(prod(shape) for _, shape in known) > prod(offers[0].shapes[name][1]):
            cuts = _cuts(known)
            spans = [[piece for span in some for piece in _pieces(span, cuts)] for some in spans]
        for own, some in zip(boxes, spans, strict=True):
            own[name] = some
    return [replace(offer, boxes=own) for offer, own in zip(offers, boxes, strict=True)]


def _cuts(spans: Collection[Span]) -> list[list[int]]:
    """Of each dimension, where a box begins or ends."""
    sides = [[(start, start + size) for start, size in zip(*span, strict=True)] for span in spans]
    return [sorted(set(chain.from_iterable(ends))) for ends in zip(*sides, strict=True)]


def _pieces(span: Span, cuts: Sequence[Sequence[int]]) -> list[Span]:
    """A box in pieces that end wherever any box begins or ends."""
    sides: list[list[tuple[int, int]]] = []
    for start, size, places in zip(*span, cuts, strict=True):
        ends = [place for place in places if start <= place <= start + size]
        sides.append([(first, last - first) for first, last in pairwise(ends)])
    return [(tuple(first for first, _ in it), tuple(size for _, size in it)) for it in product(*sides)]


def _plan_of(offer: Offer) -> SavePlan:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    return SavePlan(
        [
            WriteItem(
                index=MetadataIndex(name, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)),
                    properties=TensorProperties(DTYPES[offer.shapes[name][0]]),
                    size=torch.Size(offer.shapes[name][1]),
                ),
            )
            for name, spans in offer.boxes.items()
            for offset, shape in spans
        ]
    )
