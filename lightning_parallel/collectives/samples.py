"""What ranks computed of their samples, on all of them, with gradients."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.collectives.functional import parts_of_all, scattered, within_reach


def rows_of_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' tensors as (ranks, *shape); where their numbers of rows differ, as (1, rows of all ranks, *shape[1:]).

    So `.flatten(0, 1)`, `.view(-1, features)` and `.mean()` are right for both. E.g. ranks with shapes [11, 3] and
    [10, 3] get [1, 21, 3]. Collective over `group`, as is its backward.

    Raises:
        ValueError: on all ranks, if shapes differ in more than the number of rows, or dtypes do.
    """
    if tensor.is_meta:
        return of_all(tensor, group)
    rest = f"{tensor.dtype} with {tensor.dim()} dimensions, of which {[*tensor.shape[1:]]} follow the first"
    rows = tensor.shape[0] if tensor.dim() else 1
    numbers = torch.tensor([rows, crc32(rest.encode())])
    sizes, rests = parts_of_all(within_reach(numbers, group), group).T.tolist()
    if len({*rests}) > 1:
        said: list[Any] = [None] * group.size()
        dist.all_gather_object(said, f"{tensor.dtype} of shape {[*tensor.shape]}", group=group)
        raise ValueError(
            f"all_gather gets tensors that differ among ranks in more than the number of rows: {'; '.join(said)}; pad "
            "them to one shape first, as by torch.nn.functional.pad, or gather objects by torch.distributed"
        )
    if len({*sizes}) == 1:
        return of_all(tensor, group)
    padded = F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, max(sizes) - rows))
    of_ranks = of_all(padded, group).unbind()
    return torch.cat([each[:size] for each, size in zip(of_ranks, sizes, strict=True)])[None]


def of_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' tensors, (ranks, *shape); the gradient of each is summed over the ranks that use it.

    Torch's own (`torch.distributed.nn.functional.all_gather`) goes back to ranks of the world, not of the group.
    """
    made: Tensor = _GatheredSamples.apply(tensor, group)  # type: ignore[no-untyped-call]
    return made


class _GatheredSamples(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        if not tensor.numel():
            return tensor.new_empty((group.size(), *tensor.shape))
        return parts_of_all(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _OwnSum.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


class _OwnSum(Function):
    """The conjugate: this rank's row of the sum of the ranks' tensors."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scattered(tensor, group) if tensor.numel() else tensor.new_empty(tensor.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _GatheredSamples.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]
