"""Gradient clipping over all ranks: the norm counts each element once, whether gradients are replicated or sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.collectives.functional import group_by_dtype_and_device, to_group_device
from lightning_parallel.techniques.tools.shards import local, shards_dim


@torch.no_grad()
def clip_by_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    world: dist.ProcessGroup | None,
    ranks_holding: Callable[[Tensor], int],
) -> Tensor:
    """Scale gradients in place so that their norm over all parameters and ranks is at most `max_norm`.

    Args:
        parameters: those of one optimizer; each gradient is a DTensor or a full tensor, the same kind on every rank.
        max_norm: the largest norm allowed.
        world: the group of all ranks if any gradient may be sharded, for an all-reduce; None on every rank otherwise.
        ranks_holding: returns how many ranks hold a parameter or a shard of it; not called without a `world`.

    Returns:
        The norm before clipping, the same on every rank.
    """
    pairs = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    device = local(pairs[0][1]).device if pairs else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_copies: dict[int, list[Tensor]] = {}  # number of ranks with the same elements -> local gradients
    for parameter, gradient in pairs:
        copies = 1
        if world is not None:
            copies = ranks_holding(parameter)
            if isinstance(gradient, DTensor):
                mesh, placements = gradient.device_mesh, gradient.placements
                copies //= prod(mesh.size(dim) for dim, place in enumerate(placements) if shards_dim(place))
        by_copies.setdefault(copies, []).append(local(gradient))
    for copies, same_copies in by_copies.items():
        for same_kind in group_by_dtype_and_device(same_copies):
            norms = torch.stack(torch._foreach_norm(same_kind))  # [gradients]
            total += norms.to(device, torch.float64).square().sum() / copies
    if world is not None:
        reduced = to_group_device(total, world)  # gradients may live on the host (offload)
        dist.all_reduce(reduced, group=world)
        total = reduced.to(total.device)
    norm = total.sqrt()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for same_kind in group_by_dtype_and_device(local(gradient) for _, gradient in pairs):
        torch._foreach_mul_(same_kind, factor.to(same_kind[0].device, same_kind[0].dtype))
    return norm


@torch.no_grad()
def clip_by_value(parameters: Iterable[Tensor], limit: float) -> None:
    """Clamp every element of every gradient to [-limit, limit], in place. No communication."""
    for same_kind in group_by_dtype_and_device(
        local(parameter.grad) for parameter in parameters if parameter.grad is not None
    ):
        torch._foreach_clamp_min_(same_kind, -limit)
        torch._foreach_clamp_max_(same_kind, limit)
