"""Memory that tensors share, and whether somebody else keeps one of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def users_of(tensor: Tensor) -> int:
    """How many tensors use the memory of a tensor."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # `storage` itself


class Lent:
    """Memory in which gradients live. A user may keep one, or a view of it, when its parameter has let go of it.

    Args:
        memory: in which they lie; all views that stay are made.
        gradients: those that parameters will have for `grad`.
    """

    def __init__(self, memory: Tensor, gradients: Sequence[Tensor]) -> None:
        self._storage = memory.untyped_storage()  # stays, and so does the number by which torch knows it
        self._tensors = [*gradients, *(each._local_tensor for each in gradients if isinstance(each, DTensor))]
        self._users, self._references = self._count_users(), [*map(sys.getrefcount, self._tensors)]
        self._each = [self._count_of(index) for index in range(len(gradients))]  # who calls may count, too

    def is_kept(self, parameters: Sequence[Tensor]) -> bool:
        """Whether somebody keeps some of it: what is computed next must lie elsewhere.

        Args:
            parameters: those of the gradients, in their order. One who accumulates in its own changes it for all.
        """
        counts = [*map(sys.getrefcount, self._tensors)]
        if self._count_users() > self._users:
            return True
        if counts == self._references:
            return False
        own = [parameter.grad is gradient for parameter, gradient in zip(parameters, self._tensors, strict=False)]
        own += [False] * (len(counts) - len(own))
        return any(count > known + lent for count, known, lent in zip(counts, self._references, own, strict=True))

    def is_one_kept(self, index: int) -> bool:
        """Whether somebody keeps this gradient, or a view of any, while its parameter has another one."""
        return self._count_of(index) > self._each[index] or self._count_users() > self._users

    def _count_users(self) -> int:
        return torch._C._storage_Use_Count(self._storage._cdata)

    def _count_of(self, index: int) -> int:
        return sys.getrefcount(self._tensors[index])
