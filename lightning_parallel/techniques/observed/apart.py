"""Whether samples of a batch meet each other, as in a contrastive loss: microbatches would keep them apart.

The step runs in shapes on some samples, and on the same ones twice. Whatever it makes of each sample by itself is then
twice as large, and what it makes of pairs four times. A product that sums over samples sums over twice as many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_parallel.techniques.division import Sample
from lightning_parallel.techniques.observed.positions import buffers_kept
from lightning_parallel.techniques.observed.shapes import ShapesOnly
from lightning_parallel.techniques.tools import microbatches

PRODUCTS = {"mm", "bmm"}


@dataclass(frozen=True)
class _Made:
    """What an operation made, and over how many elements a product ran."""

    name: str
    shape: tuple[int, ...]
    along: int

    def is_of_pairs(self, twice: _Made) -> bool:
        sums = self.along > 0 and twice.along == 2 * self.along and twice.numel > 1
        return twice.numel > 2 * self.numel or sums

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def require_apart(model: nn.Module, sample: Sample) -> None:
    """Raises unless each sample of a batch counts by itself.

    Raises:
        ValueError: samples meet each other; names the operation.
    """
    half = sample.size // 2
    if not half or microbatches.batch_size(sample.batch) != sample.size:
        return
    some = microbatches.split(sample.batch, 2)[-1]  # the smaller one, where they differ
    once = _made(model, lambda: sample.run(some), sample.device)
    twice = _made(model, lambda: sample.run(microbatches.merge([some, some], [half, half])), sample.device)
    if [made.name for made in once] != [made.name for made in twice]:
        return  # the step decides by values, and nothing can be said
    for one, two in zip(once, twice, strict=True):
        if one.is_of_pairs(two):
            raise ValueError(
                f"samples of a batch meet each other in the step: {one.name} makes a tensor of shape {one.shape} of "
                f"{half} samples and one of shape {two.shape} of {2 * half}, as a contrastive loss does. In a pipeline "
                "each microbatch would meet its own samples only; use microbatches=1 or LayerParallelStrategy"
            )


def _made(model: nn.Module, run: Callable[[], Any], device: torch.device) -> list[_Made]:
    found: list[_Made] = []

    def made(func: Any, args: Any, kwargs: Any, result: Any, inputs: Sequence[Tensor]) -> bool:
        name = func._opname
        along = args[0].shape[-1] if name in PRODUCTS else 0
        shapes = (tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        found.extend(_Made(name, shape, along) for shape in shapes)
        return True

    with torch.no_grad(), buffers_kept(model), ShapesOnly(model.parameters(), device, made=made):
        try:
            run()
        except Exception:  # what the first look could follow may fail on other samples
            return []
    return found
