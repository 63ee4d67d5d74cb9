"""Several tensors of heads at positions, (B, heads, positions, width), in one message."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_parallel.collectives.spans import Span

Shape = tuple[int, ...]


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors one after the other, flat."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def room(like: Tensor, shapes: Sequence[Shape]) -> Tensor:
    """Memory for a message of tensors of these shapes, of the dtype and on the device of another tensor."""
    return like.new_empty(sum(map(math.prod, shapes)))


def unpacked(message: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """The tensors in a message."""
    parts = torch.split(message, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def with_length(tensors: Sequence[Tensor], length: int) -> list[Shape]:
    """The shapes that tensors would have with so many positions."""
    return [(*tensor.shape[:2], length, tensor.shape[3]) for tensor in tensors]


def length_of(spans: Sequence[Span]) -> int:
    """How many positions there are in spans."""
    return sum(stop - start for start, stop in spans)


def cut(tensor: Tensor, spans: Sequence[Span]) -> Tensor:
    """The positions of these spans, one after the other."""
    if len(spans) == 1:
        return tensor[:, :, slice(*spans[0])]
    return torch.cat([tensor[:, :, start:stop] for start, stop in spans] or [tensor[:, :, :0]], 2)


def put(whole: Tensor, spans: Sequence[Span], part: Tensor) -> None:
    """Writes positions that follow each other to these spans: the opposite of `cut`."""
    first = 0
    for start, stop in spans:
        whole[:, :, start:stop] = part[:, :, first : first + stop - start]
        first += stop - start


def add(whole: Tensor, spans: Sequence[Span], part: Tensor) -> None:
    """Adds positions that follow each other to these spans: the opposite of `cut` for gradients."""
    first = 0
    for start, stop in spans:
        whole[:, :, start:stop] += part[:, :, first : first + stop - start]
        first += stop - start
