"""Pairs of collectives that are each other's gradient, as maps over activations.

The gradient of a sum over ranks is a copy to all of them, that of a gather is the sum of what the ranks did with it,
and the other way round. Dimension `dim` is the one that is divided; a length that the ranks do not divide is padded
with zeros, which no gradient leaves.
Source: M. Shoeybi et al., Megatron-LM, 2019 (f and g); V. Korthikanti et al., MLSys 2023 (with a split sequence).
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.collectives.functional import parts_of_all, scattered, summed


def copy_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensor itself, of which every rank computes another part of what follows. Gradients are summed."""
    result: Tensor = _Copy.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of what ranks computed, used alike by all of them. Gradients pass."""
    result: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def gather_parts(x: Tensor, dim: int, length: int, group: dist.ProcessGroup, keep: bool = False) -> Tensor:
    """All parts of a divided tensor, of which every rank computes another part of what follows. ⇄ `sum_to_parts`.

    Args:
        x: this rank's part.
        dim: the dimension that is divided.
        length: the size of the whole along it.
        group: the ranks.
        keep: whether backward keeps the part, for `gather_parts_again`.
    """
    result: Tensor = _Gather.apply(x, dim, length, group, keep)  # type: ignore[no-untyped-call]
    return result


def gather_parts_again(node: Any) -> Tensor:
    """Gathers again the whole that `gather_parts(..., keep=True)` returned, from the node that it left in the graph."""
    (x,) = node.saved_tensors
    return whole_of_parts(x, node.dim, node.length, node.group)


def sum_to_parts(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the sum of what ranks computed. ⇄ `gather_parts`."""
    result: Tensor = _SumToParts.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return result


def own_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of a tensor that all ranks have alike. ⇄ `join_parts`."""
    result: Tensor = _OwnPart.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return result


def join_parts(x: Tensor, dim: int, length: int, group: dist.ProcessGroup) -> Tensor:
    """All parts of a divided tensor, used alike by all ranks. ⇄ `own_part`."""
    result: Tensor = _Join.apply(x, dim, length, group)  # type: ignore[no-untyped-call]
    return result


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        require_first_order()
        return summed(gradient, ctx.group), None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        require_first_order()
        return gradient, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, length: int, group: dist.ProcessGroup, keep: bool) -> Tensor:
        ctx.dim, ctx.length, ctx.group = dim, length, group
        if keep:
            ctx.save_for_backward(x)
        return whole_of_parts(x, dim, length, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        require_first_order()
        return part_of_sum(gradient, ctx.dim, ctx.group), None, None, None, None


class _SumToParts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.length, ctx.group = dim, x.shape[dim], group
        return part_of_sum(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        require_first_order()
        return whole_of_parts(gradient, ctx.dim, ctx.length, ctx.group), None, None


class _OwnPart(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.length, ctx.group = dim, x.shape[dim], group
        return _part(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        require_first_order()
        return whole_of_parts(gradient, ctx.dim, ctx.length, ctx.group), None, None


class _Join(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, length: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return whole_of_parts(x, dim, length, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        require_first_order()
        return _part(gradient, ctx.dim, ctx.group), None, None, None


def require_first_order() -> None:
    """The collectives of a backward pass are no part of a graph: a second derivative would silently lack them."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a backward pass with create_graph=True runs through activations that ranks have divided, whose gradients "
            "cannot be differentiated again; leave out the loss that needs it (such as a gradient penalty), or train "
            "with a strategy that divides no activations"
        )


# Ranks exchange what is contiguous: (ranks, ...) with each rank's part in one piece.


def whole_of_parts(x: Tensor, dim: int, length: int, group: dist.ProcessGroup) -> Tensor:
    """All parts of a divided tensor, without a gradient of its own."""
    parts = parts_of_all(x, group)  # (ranks, ..., part, ...)
    joined = parts.movedim(0, dim).flatten(dim, dim + 1)
    return joined if joined.shape[dim] == length else joined.narrow(dim, 0, length).contiguous()


def part_of_sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the sum of what ranks computed, without a gradient of its own."""
    padded = _padded(x, dim, group.size())
    shape = (*padded.shape[:dim], group.size(), -1, *padded.shape[dim + 1 :])
    return scattered(padded.reshape(shape).movedim(dim, 0), group)


def _part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    padded = _padded(x, dim, group.size())
    size = padded.shape[dim] // group.size()
    return padded.narrow(dim, group.rank() * size, size).contiguous()


def _padded(x: Tensor, dim: int, ranks: int) -> Tensor:
    missing = ceil(x.shape[dim] / ranks) * ranks - x.shape[dim]
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim)
