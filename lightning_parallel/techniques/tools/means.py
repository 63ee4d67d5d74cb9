"""Over how many targets a step's losses are means: the loss of a batch is the mean over those of all microbatches.

A cross-entropy leaves out ignored targets, so microbatches of as many samples may count differently. Only what follows
the blocks is watched, on the last stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

LOSSES: dict[Callable[..., Tensor], inspect.Signature] = {
    function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)
}


class Means(TorchFunctionMode):
    """While active, cross-entropies that are means tell over how much; one over no target at all is 0, not 0 / 0.

    Attributes:
        count: of all targets, or the sum of their weights; None where nothing was averaged.
        values: the means.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor | None = None
        self.values: list[Tensor] = []
        self._active = False

    def begin(self) -> None:
        """From now on."""
        self._active = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Up to now, if it began."""
        if self._active:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._active = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in LOSSES:
            return func(*args, **kwargs)
        call = LOSSES[func].bind(*args, **kwargs)
        call.apply_defaults()
        return self._mean(func, call.arguments) if _is_mean(call.arguments) else func(*args, **kwargs)

    def _mean(self, func: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        count = _count(**{name: arguments[name] for name in ("target", "weight", "ignore_index")})
        losses = func(**(arguments | {"reduction": "none"}))
        total = losses.sum(dtype=torch.float64 if losses.dtype == torch.float64 else torch.float32)
        mean = (total / torch.where(count == 0, torch.ones_like(count), count)).to(losses.dtype)
        self.count = count if self.count is None else self.count + count
        self.values.append(mean)
        return mean


def is_among(value: Tensor, means: Sequence[Tensor]) -> bool:
    """Whether a value is one of the means, perhaps detached."""
    return any(value.data_ptr() == mean.data_ptr() for mean in means)


def _is_mean(arguments: dict[str, Any]) -> bool:
    of_classes = not arguments["target"].is_floating_point()
    plain = arguments["size_average"] is None and arguments["reduce"] is None
    return of_classes and plain and arguments["reduction"] == "mean"


def _count(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    counted = target != ignore_index
    if weight is None:
        return counted.sum().to(torch.float32)
    return (weight[target.masked_fill(~counted, 0)] * counted).sum().to(torch.float32)


class Shares:
    """What each microbatch's loss counts for in that of the batch.

    By targets where the losses are means over targets, else by samples. How many targets there are in all is known
    only after the last microbatch, so backwards use an estimate from the first one, and `correction` puts it right.

    Args:
        sizes: the samples of each microbatch.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._of_samples = [size / sum(sizes) for size in sizes]
        self._counts: dict[int, Tensor] = {}
        self._estimate: Tensor | None = None
        self.means: dict[int, list[Tensor]] = {}

    def add(self, microbatch: int, means: Means) -> None:
        """What the step of a microbatch averaged."""
        self.means[microbatch] = means.values
        if means.count is not None:
            self._counts[microbatch] = means.count
            if self._estimate is None:
                self._estimate = means.count.clamp(min=1) / self._of_samples[microbatch]

    def seed(self, microbatch: int) -> Tensor | float:
        """By what the backward of a microbatch multiplies its loss."""
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
        counts = torch.stack([self._counts[number] for number in sorted(self._counts)]).double()
        estimate, total = float(self._estimate), float(counts.sum())
        return (counts / total).tolist(), estimate / total if total else float("nan")
