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
        whole: whether there is one loss, each of whose means counts by its targets where it is computed.
        alone: whether no other rank has samples of this batch.
        looks: whether it is to be seen what else than one mean over targets is in the losses.
    """

    def __init__(
        self, sizes: Sequence[int], weight: float, unit: float, whole: bool, alone: bool, looks: bool = False
    ) -> None:
        self.sizes = sizes
        self._of_samples = [size / sum(sizes) for size in sizes]
        self._weight, self._unit, self.whole, self._alone = weight, unit, whole, alone
        self._overs: dict[int, Over] = {}
        self._looks = looks and len(sizes) > 1
        self._apart: dict[int, tuple[list[Tensor], bool]] = {}
        self.means: dict[int, list[Tensor]] = {}

    def add(self, microbatch: int, means: Means, loss: Tensor | None) -> None:
        """Takes the means that the step of a microbatch computed, and its loss."""
        self.means[microbatch] = means.values
        if self._looks and loss is not None and loss.grad_fn is not None:
            self._apart[microbatch] = [mean.over.divisor for mean in means.counting], means.make_all_of(loss)
        over = None if self.whole else means.over
        if over is not None:
            self._overs[microbatch] = over

    def seed(self, microbatch: int) -> Tensor | float:
        """The factor by which the backward of a microbatch multiplies its loss."""
        if microbatch not in self._overs or not self._weight:
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
        if not total and not self._alone:  # the losses are 0, and other ranks may have targets
            return self._of_samples, self._unit
        # a batch without targets has no gradient, as on one device
        return [count / total if total else math.nan for count in counts], self._unit

    def mixes(self) -> bool:
        """Whether losses count otherwise than one device counts them: by all targets of a microbatch together.

        That makes no difference where microbatches have the same share of the targets of each mean, and of samples if
        there is something else in their loss.
        """
        each = [torch.stack(divisors) for _, (divisors, _) in sorted(self._apart.items()) if divisors]
        if len(each) < len(self.sizes) or len(set(map(len, each))) > 1:
            return len(each) > 0
        counts = torch.stack(each).cpu()  # (microbatches, means)
        if not counts.any():
            return False
        together = counts.sum(1, keepdim=True) / counts.sum()
        alike = torch.allclose(counts, together * counts.sum(0), atol=1e-6)
        samples = torch.tensor(self._of_samples, dtype=counts.dtype)
        alone = all(made_of_means for _, made_of_means in self._apart.values())
        return not alike or not (alone or torch.allclose(together[:, 0], samples, atol=1e-6))

    @property
    def targets(self) -> Over | None:
        """Over how many targets the whole batch is; None where losses count by samples."""
        if not self._overs:
            return None
        counts, divisors, floors = zip(*self._overs.values(), strict=True)
        return Over(float(torch.stack(counts).sum()), float(torch.stack(divisors).sum()), max(floors))
