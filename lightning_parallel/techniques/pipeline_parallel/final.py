"""Gradients that are final within a batch: those of a stage's last backward, given away as each of them arrives."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn

from lightning_parallel.techniques.step import EarlyReduction


class Final:
    """To whom gradients go that will not grow any more.

    Args:
        early: who may want them.
        alone: parameters that one stage uses, on this rank only; those of others are summed before they are final.
    """

    def __init__(self, early: Sequence[EarlyReduction] = (), alone: Collection[nn.Parameter] = ()) -> None:
        self._early, self._alone = early, alone

    def taker(self, parameter: nn.Parameter) -> EarlyReduction | None:
        """Who wants the gradient of a parameter now; None: it is handed over in backward."""
        if parameter not in self._alone:
            return None
        return next((each for each in self._early if each.wants(parameter)), None)

    def give(self, parameter: nn.Parameter, gradient: Tensor | None) -> bool:
        """Gives away what a batch has for a parameter; returns whether somebody took it."""
        taker = self.taker(parameter)
        if taker is None or (gradient is not None and gradient.is_sparse):
            return False
        if gradient is None:
            taker.lacks(parameter)
        else:
            taker.take(parameter, gradient)
        return True

    def multiply(self, factor: Tensor) -> None:
        """In backward: by what all that was taken is to be multiplied."""
        for each in self._early:
            each.multiply(factor.item())
