"""What ranks computed of their samples, on all of them, with gradients."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.collectives.functional import parts_of_all, scattered


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
