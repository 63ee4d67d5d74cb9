"""Shares that microbatches' losses have in the batch's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_parallel.techniques.tools.means import Means, Over


class Shares:
    """Shares that microbatches' losses have in the batch's.

    By targets where the losses are means over targets, else by samples. How many targets there are in all is known only
    after the last microbatch, and on all ranks. So backwards sum over targets, and the sum becomes a mean in the end:
    ranks may have given gradients to each other by then, as experts do, so what differs between ranks is in each
    backward, and what is left to multiply by is the same on all.

    Args:
        sizes: the samples of each microbatch.
        weight: how much this rank's samples count against those of others.
        unit: so many targets count as one in backwards, to keep gradients of a usual size; the same on all ranks.
        whole: whether there is one loss, whose gradients count by targets where they are computed.
        alone: whether no other rank has samples of this batch.
    """

    def __init__(self, sizes: Sequence[int], weight: float, unit: float, whole: bool, alone: bool) -> None:
        self.sizes = sizes
        self._of_samples = [size / sum(sizes) for size in sizes]
        self._weight, self._unit, self._whole, self._alone = weight, unit, whole, alone
        self._overs: dict[int, Over] = {}
        self.means: dict[int, list[Tensor]] = {}

    def add(self, microbatch: int, means: Means) -> None:
        """Takes the means that the step of a microbatch computed."""
        self.means[microbatch] = means.values
        over = means.over
        if over is not None:
            self._overs[microbatch] = over

    def seed(self, microbatch: int) -> Tensor | float:
        """The factor by which the backward of a microbatch multiplies its loss."""
        if self._whole or microbatch not in self._overs or not self._weight:
            return self._of_samples[microbatch] * self._weight
        seed: Tensor = self._overs[microbatch].divisor / self._unit
        return seed

    def final(self) -> tuple[list[float], float | None]:
        """The share of each microbatch, and how many targets count as one in gradients; None if these are means.

        Raises:
            ValueError: some microbatches averaged over targets, and others did not.
        """
        if not self._overs:
            return self._of_samples, None
        if len(self._overs) < len(self._of_samples):
            raise ValueError(
                f"training_step computed a mean over targets for microbatches {sorted(self._overs)} of "
                f"{len(self._of_samples)} only; in a pipeline all of them count in one way: decide it by batch_idx, or "
                "use microbatches=1"
            )
        counts = [float(over.divisor) for _, over in sorted(self._overs.items())]
        total = sum(counts)
        unit = None if self._whole else self._unit
        if not total and not self._alone:  # the losses are 0, and other ranks may have targets
            return self._of_samples, unit
        # a batch without targets has no gradient, as on one device
        return [count / total if total else math.nan for count in counts], unit

    @property
    def targets(self) -> Over | None:
        """Over how many targets the whole batch is; None where losses count by samples."""
        if not self._overs:
            return None
        counts, divisors, floors = zip(*self._overs.values(), strict=True)
        return Over(float(torch.stack(counts).sum()), float(torch.stack(divisors).sum()), max(floors))
