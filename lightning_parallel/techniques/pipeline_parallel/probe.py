"""Measures whether a batch may be divided: a few samples as one batch and as two parts must give the same loss.

    loss(s0, s1, s8, s9, s10) = 2/5 loss(s0, s1) + 3/5 loss(s8, s9, s10)

That holds for a mean over samples, and with shares of targets for a mean over targets. It does not hold where samples
interact, as in a contrastive loss or in BatchNorm, or where a loss adds up means over different things.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_parallel.collectives.functional import parts_of_all

REMEDIES = (
    "samples interact, or the loss adds up means over different things. Pass PipelineParallel(loss_over='batch') to "
    "compute what follows the blocks once for the batch, for which a rank keeps the activations of all microbatches; "
    "microbatches=1 where samples interact in blocks too; or loss_over='microbatches' to accept the mean over "
    "microbatches. A mean over a mask is lightning_parallel.mean(total, count)",
    "though what follows the blocks ran once for all of them, so samples interact in blocks, as in BatchNorm; pass "
    "PipelineParallel(microbatches=1), or loss_over='microbatches' to accept the mean over microbatches",
)
"""For a loss over microbatches, and for one over the batch."""

MOST = (2, 3)
"""How many samples the two parts have at most: unequal, and more than one, of which BatchNorm has no variance."""


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, random operations draw constants, so that a sample's draws do not depend on the others of its batch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, names = dict(kwargs or {}), [argument.name for argument in func._schema.arguments]
        if "dropout_p" in names:  # attention kernels
            kwargs.pop("dropout_p", None)
            return func(
                *(0.0 if name == "dropout_p" else each for name, each in zip(names, args, strict=False)), **kwargs
            )
        made = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return made
        if "native_dropout" in func._opname:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        low = args[names.index("low")] if "low" in names else 0  # 0 is an index of a batch of any size
        return made.fill_(0.5 if made.is_floating_point() else low) if isinstance(made, Tensor) else made


class Measured(NamedTuple):
    """The loss of some samples, and that of their two parts together."""

    sizes: Sequence[int]  # how many samples each part had
    whole: float  # the loss of all of them
    together: float  # the losses of the parts, combined by their shares
    unlike: float = False  # whether the shares were other than those of samples
    tolerance: float = 1e-4  # the relative difference that rounding may make

    @property
    def fits(self) -> bool:
        """Whether the parts give the loss of the whole. An infinite loss tells nothing."""
        difference = abs(self.whole - self.together)
        return not difference > self.tolerance * max(1e-3, abs(self.whole)) or math.isinf(difference)

    def __str__(self) -> str:
        first, second = self.sizes
        return (
            f"the loss of {first + second} samples is {self.whole:.6g}, but those of {first} and {second} of them "
            f"together make {self.together:.6g}"
        )


def rows_of(sizes: Sequence[int], pair: tuple[int, int]) -> tuple[slice, slice]:
    """The samples that are measured: the first ones of two microbatches."""
    first, second = (sum(sizes[:number]) for number in pair)
    return slice(first, first + min(sizes[pair[0]], MOST[0])), slice(second, second + min(sizes[pair[1]], MOST[1]))


NOTHING = Measured((1, 1), 0.0, 0.0)


def tolerance(model: nn.Module, device: torch.device) -> float:
    """The relative difference that rounding may make in losses of a model: 1e-4, or more in half precision."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if torch.is_autocast_enabled(device.type):
        dtypes.add(torch.get_autocast_dtype(device.type))
    return max([1e-4, *(torch.finfo(dtype).eps for dtype in dtypes)])


class Pending:
    """Decides which batches are measured: the first one, and the first in which targets count otherwise than samples.

    All ranks of the group, which hold the same stages and see other samples, measure in the same batches.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, over_targets: bool) -> None:
        self._group, self._device = group, device
        self._first, self._unlike = True, over_targets  # shares may be those of targets

    def pair(self, sizes: Sequence[int], shares: Sequence[float]) -> tuple[int, int] | None:
        """The two microbatches to be measured, twice the same where a batch has one; None for no measurement.

        Collective over the group until nothing is pending.
        """
        ratios = [share / size for size, share in zip(sizes, shares, strict=True)]
        low, high = ratios.index(min(ratios)), ratios.index(max(ratios))
        unlike = ratios[high] - ratios[low] > 1e-6 / sum(sizes)
        wanted = len(sizes) > 1 and (self._first or (unlike and self._unlike))
        if not (self._first or self._unlike) or not any(wanted for (wanted,) in self._gathered(wanted)):
            return None
        return (low, high) if unlike else (0, min(1, len(sizes) - 1))

    def agree(self, own: Measured) -> Measured | None:
        """The first measurement that does not fit, of any rank. Collective over the group."""
        found = [Measured((int(a), int(b)), *rest) for a, b, *rest in self._gathered(*own.sizes, *own[1:])]
        self._first, self._unlike = False, self._unlike and not any(each.unlike for each in found)
        return next((each for each in found if not each.fits), None)

    def _gathered(self, *numbers: float) -> list[list[float]]:
        if self._group.size() == 1:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        every: list[list[float]] = parts_of_all(own, self._group).tolist()
        return every
