"""What ranks must agree on to reduce gradients before backward: that all do, and by what they are multiplied."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from lightning_parallel.collectives.functional import all_reduce


class Agreement:
    """Whether every rank lets gradients be reduced early; asked behind the forward, read where the first is final.

    Args:
        allowed: whether this rank does.
        group: the ranks, all of which must ask.
        device: where messages live.
    """

    def __init__(self, allowed: bool, group: dist.ProcessGroup, device: torch.device) -> None:
        self._objections = torch.tensor(0.0 if allowed else 1.0, device=device)
        self._pending = all_reduce(self._objections, group)
        self._reached: bool | None = None

    @property
    def reached(self) -> bool:
        """Whether nobody objects."""
        if self._reached is None:
            self._pending.wait()
            self._reached = self._objections.item() == 0
        return self._reached


class Factor:
    """By what backward multiplies the gradients of this rank, which must be that of all ranks, or not finite for all.

    Args:
        factor: of this rank.
        group: the ranks, all of which must say theirs.
        device: where messages live.
    """

    def __init__(self, factor: float, group: dist.ProcessGroup, device: torch.device) -> None:
        self._own, self._ranks = factor, group.size()
        self._sums = torch.tensor([factor, factor * factor], dtype=torch.float64, device=device)
        self._pending = all_reduce(self._sums, group)

    def agreed(self) -> float:
        """The factor of all ranks.

        Raises:
            RuntimeError: on every rank; they have different ones.
        """
        self._pending.wait()
        sum_, squares = self._sums.tolist()
        if not math.isfinite(sum_):
            return math.nan
        if not math.isclose(self._ranks * squares, sum_ * sum_, rel_tol=1e-5):
            raise RuntimeError(
                f"the loss was multiplied between training_step and backward by {self._own:g} on this rank, and by "
                "something else on others, but gradients of a pipeline are reduced over ranks before that; multiply "
                "it in training_step, or override LightningModule.backward: then they are reduced after it"
            )
        return self._own
