"""What a module calls a tensor, and what the hub does: another name, several parts, or one tensor for each expert."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_parallel.checkpoint.damage import REMEDY, Damaged
from lightning_parallel.checkpoint.stored import Piece, StoredTensor, in_memory

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Names:
    """Names of one kind of tensors.

    Args:
        own: in the module. `*` is one part of a name, `**` any number of them, also none.
        hub: in the hub, with the same stars. Where there are several, they are equal parts, one behind the other along
            a dimension of the module's tensor: its first, or its second where a `#` stands in the hub's names. That is
            a number: every index of the first dimension is a tensor of its own there, without that dimension.
    """

    own: str
    hub: tuple[str, ...]

    def groups(self, name: str) -> tuple[str, ...] | None:
        """What the stars stand for in a module's name; None for a name of another kind."""
        pattern = re.escape(self.own).replace(r"\*\*", "(.*)").replace(r"\*", "([^.]+)")
        found = re.fullmatch(pattern, name)
        return found.groups() if found else None


class Part(NamedTuple):
    """A tensor of the hub: where it begins in the module's, and the shape that it has there."""

    hub: str
    offset: Shape
    shape: Shape
    is_row: bool  # without the first dimension, in the hub


def parts_of(name: str, shape: Shape, known: Sequence[Names]) -> list[Part]:
    """What the hub makes of a tensor; one of no known kind is the same there."""
    for names in known:
        if (groups := names.groups(name)) is not None:
            return list(_parts(names, groups, shape))
    return [Part(name, (0,) * len(shape), shape, False)]


def _parts(names: Names, groups: tuple[str, ...], shape: Shape) -> Iterator[Part]:
    rows = "#" in names.hub[0]
    dim = 1 if rows else 0
    size = list(shape)
    if len(names.hub) > 1:
        if shape[dim] % len(names.hub):
            raise ValueError(f"{names.own}: {shape[dim]} rows are no {len(names.hub)} equal parts")
        size[dim] //= len(names.hub)
    for row in range(shape[0]) if rows else [0]:
        for number, pattern in enumerate(names.hub):
            offset = [0] * len(shape)
            if len(names.hub) > 1:
                offset[dim] = number * size[dim]
            if rows:
                offset[0], size[0] = row, 1
            yield Part(_filled(pattern, groups).replace("#", str(row)), tuple(offset), tuple(size), rows)


def _filled(pattern: str, groups: Iterable[str]) -> str:
    stars = iter(groups)
    return re.sub(r"\*\*?", lambda _: next(stars), pattern)


def to_hub(state: Mapping[str, Tensor], known: Sequence[Names]) -> dict[str, Tensor]:
    """A module's tensors as the hub has them; they are made when they are used."""
    made: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for part in parts_of(name, tuple(tensor.shape), known):
            if part.shape == tensor.shape and not part.is_row:
                made[part.hub] = tensor
            else:
                shape = part.shape[part.is_row :]
                made[part.hub] = StoredTensor(tensor.dtype, shape, [_whole(shape, partial(_cut, tensor, part))])
    return made


def _cut(tensor: Tensor, part: Part) -> Tensor:
    slices = tuple(slice(first, first + size) for first, size in zip(part.offset, part.shape, strict=True))
    cut: Tensor = in_memory(tensor[slices])
    return cut.reshape(part.shape[part.is_row :])


def _whole(shape: Shape, read: partial[Tensor]) -> Piece:
    return (0,) * len(shape), shape, read


def from_hub(weights: Mapping[str, Tensor], shapes: Mapping[str, Shape], known: Sequence[Names]) -> dict[str, Tensor]:
    """The tensors of a module, as far as the hub's are there; each rank reads of them what it uses.

    Args:
        weights: the hub's, under its names.
        shapes: of the module's tensors.
        known: kinds of names.

    Raises:
        Damaged: of a tensor some parts are there, and some are not; or a part has another shape.
    """
    made: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if name in weights:  # written under the module's own names
            made[name] = weights[name]
            continue
        parts = parts_of(name, shape, known)
        missing = [part.hub for part in parts if part.hub not in weights]
        if len(missing) == len(parts):
            continue
        if missing:
            raise Damaged(f"{name} is made of {len(parts)} tensors, and {missing[0]} is missing; {REMEDY}")
        made[name] = weights[parts[0].hub] if len(parts) == 1 else _joined(weights, shape, parts)
    return made


def _joined(weights: Mapping[str, Tensor], shape: Shape, parts: Sequence[Part]) -> StoredTensor:
    pieces = []
    dtypes: set[torch.dtype] = set()
    for part in parts:
        found = weights[part.hub]
        if tuple(found.shape) != part.shape[part.is_row :]:
            raise Damaged(
                f"{part.hub} has the shape {tuple(found.shape)}, and the model needs {part.shape[part.is_row :]}; "
                "build it from the config.json of the same folder"
            )
        dtypes.add(found.dtype)
        pieces.append((part.offset, part.shape, partial(placed, found, part.shape)))
    if len(dtypes) > 1:
        raise Damaged(f"{parts[0].hub} and what lies beside it have different dtypes: {sorted(map(str, dtypes))}")
    assert sum(prod(part.shape) for part in parts) == prod(shape)
    return StoredTensor(dtypes.pop(), shape, pieces)


def placed(tensor: Tensor, shape: Shape) -> Tensor:
    """A tensor of the hub, read, in the shape that it has within the module's."""
    read: Tensor = in_memory(tensor)
    return read.reshape(shape)
