"""Quotients that a step logs and no gradient follows, as in an evaluation: some are means over what divides them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_parallel.strategies.logged.kind_watch import KindWatch
from lightning_parallel.strategies.logged.kinds import Kind
from lightning_parallel.techniques.tools.means import Means


class Quotients:
    """Which logged values are one sum over samples divided by another: the first batches of a hook tell, by name.

    Without a graph a value does not tell what it was made of, but there what a step computes is watched.
    """

    def __init__(self) -> None:
        self._of_sums: dict[tuple[str, str], bool] = {}

    def seen(
        self, hook: str, name: str, value: Tensor, means: Means, watch: KindWatch | None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """A logged value, and where it is a mean that part of it: all. Over nothing it is 0: other ranks may have some.

        Args:
            hook: in which it is logged.
            name: under which.
            value: as it was logged.
            means: of the step; this one is added.
            watch: sees what the step computes; None after the first batches.
        """
        made = means.quotient(value)
        if made is None:
            return value, {}
        total, divisor = made
        count, floor = means.floor_of(divisor) or (divisor, 0.0)
        if watch is not None:
            of_sums = watch.kind_of(total) is Kind.SUM and watch.kind_of(count) is Kind.SUM
            self._of_sums[hook, name] = of_sums and self._of_sums.get((hook, name), True)
        if not self._of_sums.get((hook, name), False):
            return value, {}
        mean = torch.where(divisor == 0, torch.zeros_like(value), value)
        means.note(mean, count, divisor=divisor, floor=floor)
        return mean, {len(means.all) - 1: mean}
