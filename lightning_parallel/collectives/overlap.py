"""Matrix products together with the collective before or after them.

On GPUs that reach each other's memory, the product of a part starts as it arrives, or leaves as it is made; elsewhere
one follows the other. Dimension `dim` is the one along which ranks have parts; all have as many.
Source: PyTorch's symmetric memory (`torch.ops.symm_mem`), after S. Wang et al., Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models, ASPLOS 2023.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.collectives.by_elements import require_first_order
from lightning_parallel.collectives.functional import joined_parts, part_of_total, result, uses_exchange


def gather_and_multiply(part: Tensor, weight: Tensor, dim: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The whole of which ranks have parts, and its product with `weight` (out, in). Gradients are summed to parts."""
    whole, product = _GatherAndMultiply.apply(part, weight, dim, group)  # type: ignore[no-untyped-call]
    return whole, product


def multiply_and_scatter(x: Tensor, weight: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the sum over ranks of their products of `x` with `weight` (out, in)."""
    own: Tensor = _MultiplyAndScatter.apply(x, weight, dim, group)  # type: ignore[no-untyped-call]
    return own


class _GatherAndMultiply(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, dim: int, group: dist.ProcessGroup) -> Any:
        whole, product = _gathered_product(part, weight.t(), dim, group)
        ctx.save_for_backward(whole, weight)
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.group = dim, group
        return result(whole), result(product)

    @staticmethod
    def backward(ctx: Any, of_whole: Tensor | None, of_product: Tensor | None) -> Any:
        require_first_order()
        (whole, weight), of_weight, total = ctx.saved_tensors, None, of_whole
        if of_product is not None:
            of_weight = _rows(of_product).t() @ _rows(whole)
            total = of_product @ weight if of_whole is None else of_whole + of_product @ weight
        return None if total is None else part_of_total(total, ctx.dim, ctx.group), of_weight, None, None


class _MultiplyAndScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dim, ctx.group = dim, group
        return result(_scattered_product(x, weight.t(), dim, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        require_first_order()
        x, weight = ctx.saved_tensors
        whole, of_x = _gathered_product(gradient, weight, ctx.dim, ctx.group)
        return of_x, _rows(whole).t() @ _rows(x), None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _gathered_product(part: Tensor, matrix: Tensor, dim: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    if reaches_memory(part, group):
        fused = symmetric("fused_all_gather_matmul")
        whole, (product,) = fused(part.contiguous(), [matrix], dim, group.group_name)
        return whole, product
    whole = joined_parts(part, dim, group)
    return whole, F.linear(whole, matrix.t())


def _scattered_product(x: Tensor, matrix: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    if reaches_memory(x, group):
        fused = symmetric("fused_matmul_reduce_scatter")
        own: Tensor = fused(x.contiguous(), matrix, "sum", dim, group.group_name)
        return own
    return part_of_total(F.linear(x, matrix.t()), dim, group)


def reaches_memory(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether products of this tensor may read other ranks' memory: over gloo several may share one GPU."""
    return tensor.is_cuda and not uses_exchange(group)


def symmetric(name: str) -> Callable[..., Any]:
    """One of PyTorch's operations on symmetric memory."""
    importlib.import_module("torch.distributed._symmetric_memory")  # which registers them
    operation: Callable[..., Any] = getattr(torch.ops.symm_mem, name)
    return operation
