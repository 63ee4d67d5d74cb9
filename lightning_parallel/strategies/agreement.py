"""What ranks tell each other so that a mistake on one is an error on all, and never a wait."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

T = TypeVar("T")


def gather(value: T, group: dist.ProcessGroup) -> list[T]:
    """The values of all ranks of the group, in their order."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def describe(batch: Any) -> str:
    """The structure of a batch: its containers, and the type, dtype and dimensions of what they hold."""
    leaves, structure = pytree.tree_flatten(batch)
    return f"{structure} of [{', '.join(map(_describe_leaf, leaves))}]"


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} tensor with {leaf.dim()} dimensions"
    return type(leaf).__name__


def fingerprint_model(module: nn.Module) -> str:
    """A short name for the parameters' names, shapes and dtypes."""
    described = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in module.named_parameters()]
    return f"{len(described)} parameters, {hashlib.sha256(chr(10).join(described).encode()).hexdigest()[:12]}"


def require_same(what: str, values: Sequence[object], remedy: str) -> None:
    """Raises on every rank, naming ranks and values, unless all values are equal."""
    if len(set(map(str, values))) == 1:
        return
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(str(value), []).append(rank)
    listed = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {v}" for v, ranks in by_value.items()
    )
    raise ValueError(f"{what} must be the same on every rank, but they differ ({listed}); {remedy}")


def largest(values: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """The element-wise maximum over all ranks."""
    packed = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
    return [float(value) for value in packed]
