"""Numerical check whether the loss of a batch is the weighted mean of the losses of its microbatches.

The step runs on a few samples as one batch, and on two parts of them; the losses must combine:

    loss(s0, s1, s8, s9, s10) = 2/5 loss(s0, s1) + 3/5 loss(s8, s9, s10)

This holds for a mean over samples, and for a mean over targets if parts are weighted by their targets. It does not hold
if samples interact, as in a contrastive loss or BatchNorm, or if the loss adds up means over different targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_parallel.collectives.functional import all_gather_stacked

REMEDIES = (
    "samples interact, or the loss sums means over different things. Pass PipelineParallel(loss_over='batch') to run "
    "the code after the blocks once for the batch (a rank then keeps the activations of all microbatches), "
    "microbatches=1 if samples interact in blocks too, or loss_over='microbatches' to accept the mean over "
    "microbatches. Compute a mean over a mask by lightning_parallel.mean(total, count)",
    "the code after the blocks ran once for all of them, so samples interact in blocks, as in BatchNorm; pass "
    "PipelineParallel(microbatches=1), or loss_over='microbatches' to accept the mean over microbatches",
)
"""Advice in errors: `REMEDIES[0]` for a loss per microbatch, `REMEDIES[1]` for `loss_over="batch"`."""

MOST = (2, 3)
"""Largest numbers of samples of the two parts: unequal, and at least 2, because BatchNorm needs a variance."""


class ConstantDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replace random numbers by constants in a context, so that those of a sample do not depend on other samples."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, names = dict(kwargs or {}), [argument.name for argument in func._schema.arguments]
        if "dropout_p" in names:  # attention kernels: call them without dropout
            kwargs.pop("dropout_p", None)
            return func(
                *(0.0 if name == "dropout_p" else value for name, value in zip(names, args, strict=False)), **kwargs
            )
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        if "native_dropout" in func._opname:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        low = args[names.index("low")] if "low" in names else 0  # 0 is a valid index into a batch of any size
        return result.fill_(0.5 if result.is_floating_point() else low) if isinstance(result, Tensor) else result


class LossComparison(NamedTuple):
    """Loss of some samples as one batch, and in two parts."""

    sizes: Sequence[int]  # number of samples of each part
    whole: float  # loss of all samples as one batch
    together: float  # losses of the parts, weighted by their shares
    unlike: float = False  # whether the shares differ from the fractions of samples
    tolerance: float = 1e-4  # largest relative difference that is ascribed to rounding

    @property
    def fits(self) -> bool:
        """True if the two losses are equal up to rounding, or if they cannot be compared (infinite or NaN)."""
        difference = abs(self.whole - self.together)
        return not difference > self.tolerance * max(1e-3, abs(self.whole)) or math.isinf(difference)

    def __str__(self) -> str:
        first, second = self.sizes
        return (
            f"the loss of {first + second} samples is {self.whole:.6g}, but those of {first} and {second} of them "
            f"together make {self.together:.6g}"
        )


NOTHING = LossComparison((1, 1), 0.0, 0.0)  # sent by ranks that measured nothing; it fits


def tolerance(model: nn.Module, device: torch.device) -> float:
    """Return the relative rounding error to expect in losses of a model: 1e-4, or more in half precision."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if torch.is_autocast_enabled(device.type):
        dtypes.add(torch.get_autocast_dtype(device.type))
    return max([1e-4, *(torch.finfo(dtype).eps for dtype in dtypes)])


class Pending:
    """Choice of the batches to measure: the first, and the first whose target shares differ from sample fractions.

    All ranks of `group` (the same stages, different samples) measure in the same batches.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, over_targets: bool) -> None:
        self._group, self._device = group, device
        self._first, self._unlike = True, over_targets  # whether each kind of batch is still to be measured

    def pair(self, sizes: Sequence[int], shares: Sequence[float]) -> tuple[int, int] | None:
        """Return the two microbatches to measure (twice the same one if there is only one), or None.

        Collective over `group` until nothing is pending.
        """
        ratios = [share / size for size, share in zip(sizes, shares, strict=True)]
        low, high = ratios.index(min(ratios)), ratios.index(max(ratios))
        unlike = ratios[high] - ratios[low] > 1e-6 / sum(sizes)
        is_wanted = len(sizes) > 1 and (self._first or (unlike and self._unlike))
        if not (self._first or self._unlike) or not any(is_wanted for (is_wanted,) in self._gathered(is_wanted)):
            return None
        return (low, high) if unlike else (0, min(1, len(sizes) - 1))

    def agree(self, own: LossComparison) -> LossComparison | None:
        """Return the first measurement of any rank that does not fit, or None. Collective over `group`."""
        measurements = [LossComparison((int(a), int(b)), *rest) for a, b, *rest in self._gathered(*own.sizes, *own[1:])]
        self._first, self._unlike = False, self._unlike and not any(measured.unlike for measured in measurements)
        return next((measured for measured in measurements if not measured.fits), None)

    def _gathered(self, *numbers: float) -> list[list[float]]:
        if self._group.size() == 1:
            return [list(numbers)]
        local = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        gathered: list[list[float]] = all_gather_stacked(local, self._group).tolist()
        return gathered
