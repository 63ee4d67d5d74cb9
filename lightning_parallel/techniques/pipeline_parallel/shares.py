"""Shares that microbatches' losses have in the batch's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_parallel.techniques.tools.means import Means


class Shares:
    """Shares that microbatches' losses have in the batch's.

    By targets where the losses are means over targets, else by samples. How many targets there are in all is known
    only after the last microbatch, so backwards use an estimate from the first one, and `correction` puts it right.

    Args:
        sizes: the samples of each microbatch.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self._of_samples = [size / sum(sizes) for size in sizes]
        self._counts: dict[int, Tensor] = {}
        self._estimate: Tensor | None = None
        self.means: dict[int, list[Tensor]] = {}

    def add(self, microbatch: int, means: Means) -> None:
        """Takes the means that the step of a microbatch computed."""
        self.means[microbatch] = means.values
        count = means.count
        if count is not None:
            self._counts[microbatch] = count
            if self._estimate is None:
                self._estimate = count.clamp(min=1) / self._of_samples[microbatch]

    def seed(self, microbatch: int) -> Tensor | float:
        """The factor by which the backward of a microbatch multiplies its loss."""
        if self._estimate is None or microbatch not in self._counts:
            return self._of_samples[microbatch]
        return self._counts[microbatch] / self._estimate

    def final(self) -> tuple[list[float], float]:
        """The share of each microbatch, and by what gradients are to be multiplied.

        Raises:
            ValueError: some microbatches averaged over targets, and others did not.
        """
        if not self._counts:
            return self._of_samples, 1.0
        if len(self._counts) < len(self._of_samples):
            raise ValueError(
                f"training_step computed a cross-entropy for microbatches {sorted(self._counts)} of "
                f"{len(self._of_samples)} only; in a pipeline all of them count in one way: decide it by batch_idx, or "
                "use microbatches=1"
            )
        assert self._estimate is not None
        counts = [float(count) for _, count in sorted(self._counts.items())]
        estimate, total = float(self._estimate), sum(counts)
        # a batch without targets has no gradient, as on one device
        return [count / total if total else math.nan for count in counts], estimate / total if total else 1.0

    @property
    def targets(self) -> float | None:
        """The number of targets in the whole batch; None where losses count by samples."""
        return float(torch.stack(list(self._counts.values())).sum()) if self._counts else None
