"""Heads of keys and values that a model repeats before attention, where each of them is enough.

Models that share a head of keys among several of queries write `x[:, :, None].expand(...).reshape(...)` or
`x.repeat_interleave(n, 1)`. What comes out is noted as what it is, so that attention along a divided sequence sends
each head once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.made_of import Version, version
from lightning_parallel.techniques.divided.tensor import Divided


class _Repeats(NamedTuple):
    once: Divided
    times: int
    version: Version  # of the memory of what was repeated


def note_reshaped(before: Divided, after: Divided) -> None:
    """Notes that a reshape made copies of heads: (..., heads, times, T, D), expanded, to (..., heads * times, T, D)."""
    dim = before.dim() - 3
    if _ranks_of(after) is None or dim < 1 or after.dim() != before.dim() - 1 or dim in before.cuts:
        return
    if before.shape[dim] == 1 or before.own.stride(dim) != 0:
        return
    once = Divided(before.own.select(dim, 0), {k - (k > dim): each for k, each in before.cuts.items()})
    if after.shape == (*once.shape[: dim - 1], once.shape[dim - 1] * before.shape[dim], *once.shape[dim:]):
        note_repeated(once, after, before.shape[dim], dim - 1)


def note_repeated(once: Divided, after: Divided, times: int, dim: int) -> None:
    """Notes that a tensor has each element of a dimension several times, one after the other."""
    ranks = _ranks_of(after)
    if ranks is not None and dim == after.dim() - 3:
        _note_of(after, ranks, _Repeats(once, times, version(once.own)))


def without_repeats(tensor: Divided) -> tuple[Divided, int]:
    """The tensor with each of its heads once, and how often the tensor has them."""
    ranks, heads = _ranks_of(tensor), tensor.dim() - 3
    if ranks is None:
        return tensor, 1
    if heads >= 0 and heads not in tensor.cuts and tensor.shape[heads] > 1 and tensor.own.stride(heads) == 0:
        return Divided(tensor.own.narrow(heads, 0, 1), tensor.cuts), tensor.shape[heads]
    noted = _note_of(tensor, ranks, None)
    if noted is None or noted.version != version(noted.once.own):
        return tensor, 1
    return noted.once, noted.times


def _note_of(tensor: Divided, ranks: Ranks, made: _Repeats | None) -> _Repeats | None:
    """What was noted first."""
    return ranks.made_of.wrapper(tensor, tensor.own).get("repeats", lambda: made)


def _ranks_of(tensor: Divided) -> Ranks | None:
    """The ranks that divide positions of heads, (..., heads, positions, width), if they attend together."""
    elements = tensor.cuts.get(tensor.dim() - 2)
    if torch.compiler.is_dynamo_compiling() or elements is None or elements.ranks.attention is None:
        return None
    return elements.ranks
