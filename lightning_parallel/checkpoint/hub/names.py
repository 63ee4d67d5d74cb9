"""What a module calls a tensor, and what the hub does: another name, several parts, or one tensor for each expert."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

from torch import Tensor

from lightning_parallel.checkpoint.damage import REMEDY, Damaged
from lightning_parallel.checkpoint.stored import StoredTensor, all_of, in_memory

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
                made[part.hub] = StoredTensor(tensor.dtype, shape, all_of(shape, partial(_cut, tensor, part)))
    return made


def _cut(tensor: Tensor, part: Part) -> Tensor:
    slices = tuple(slice(first, first + size) for first, size in zip(part.offset, part.shape, strict=True))
    cut: Tensor = in_memory(tensor[slices])
    return cut.reshape(part.shape[part.is_row :])


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
        _require_shapes(weights, parts)
        made[name] = weights[parts[0].hub]
        if len(parts) > 1:
            made[name] = joined(name, shape, [(part.offset, part.shape, weights[part.hub]) for part in parts])
    return made


def _require_shapes(weights: Mapping[str, Tensor], parts: Sequence[Part]) -> None:
    for part in parts:
        found = tuple(weights[part.hub].shape)
        if found != part.shape[part.is_row :]:
            raise Damaged(
                f"{part.hub} has the shape {found}, and the model needs {part.shape[part.is_row :]}; "
                "build it from the config.json of the same folder"
            )


def joined(name: str, shape: Shape, parts: Sequence[tuple[Shape, Shape, Tensor]]) -> StoredTensor:
    """One tensor of several of the hub.

    Args:
        name: of the tensor that is made.
        shape: of it.
        parts: where each begins in it, the shape that each has there, and its values; they do not overlap.

    Raises:
        Damaged: they do not fill it, or have different dtypes.
    """
    inside = all(first + size <= whole for offset, part, _ in parts
                 for first, size, whole in zip(offset, part, shape, strict=True))  # fmt: skip
    if not inside or sum(prod(part) for _, part, _ in parts) != prod(shape):
        raise Damaged(f"the {len(parts)} tensors that {name} is made of do not fill {shape}; {REMEDY}")
    dtypes = {tensor.dtype for *_, tensor in parts}
    if len(dtypes) > 1:
        raise Damaged(
            f"the {len(parts)} tensors that {name} is made of have different dtypes: {sorted(map(str, dtypes))}; write "
            "the folder in one, as from_pretrained(…, dtype=…).save_pretrained(…) does"
        )
    pieces = [(offset, part, partial(_placed, tensor, part)) for offset, part, tensor in parts]
    return StoredTensor(dtypes.pop(), shape, pieces)


def _placed(tensor: Tensor, shape: Shape) -> Tensor:
    read: Tensor = in_memory(tensor)
    return read.reshape(shape)
