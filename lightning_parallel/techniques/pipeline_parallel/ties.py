"""Parameters that live on several stages, as tied embeddings do: their gradients are those of all uses together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_parallel.collectives.point_to_point import Lane

Tie = tuple[int, ...]
"""The ranks of a pipeline that hold one parameter, ascending."""


def sum_over_holders(gradients: Mapping[Tie, Sequence[Tensor]], lane: Lane, rank: int) -> None:
    """Sums gradients in place over the ranks that hold their parameters, in one order, so that all get equal sums.

    Args:
        gradients: by the ranks that hold them, this one among them; the same tensors in the same order on each.
        lane: the ranks of the pipeline.
        rank: this rank in it.
    """
    for holders, tensors in sorted(gradients.items()):
        own = torch.cat([tensor.reshape(-1) for tensor in tensors])
        others = {holder: torch.empty_like(own) for holder in holders if holder != rank}
        lane.exchange(own, others)
        parts = others | {rank: own}
        total = sum((parts[holder] for holder in holders[1:]), parts[holders[0]])
        for tensor, values in zip(tensors, torch.split(total, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(values.view_as(tensor))
