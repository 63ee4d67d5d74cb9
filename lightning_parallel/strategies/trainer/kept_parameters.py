"""Parameters that an optimizer keeps in attributes of its own, as in a list, or in a table by parameter or by `id`.

While it steps, others stand in its groups for those of which ranks have parts: it finds them there, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_parallel.strategies.build.within import holds, replaced
from lightning_parallel.techniques.gradients.groups import Pair

OF_TORCH = ("param_groups", "state", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of every optimizer that others see to, or that are being gone through while it begins to step."""


class KeptParameters:
    """The attributes of one optimizer in which there are parameters of its groups.

    Args:
        optimizer: the user's, whose groups hold parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        without = {id(each): each for each in self._known()}
        own = [(name, value) for name, value in vars(optimizer).items() if name not in OF_TORCH]
        self._attributes = [name for name, value in own if holds(value, ids, without)]

    def exchange(self, pairs: Sequence[Pair]) -> None:
        """Puts the second of each pair there, where the first is."""
        table, seen = vars(self._optimizer), {id(each): (each, each) for each in self._known()}
        exchanged = {id(before): after for before, after in pairs}
        for name in self._attributes if exchanged else ():
            if name in table:
                table[name] = replaced(table[name], exchanged, seen)

    def _known(self) -> list[Any]:
        """What is exchanged elsewhere, and may be led to from here."""
        groups = self._optimizer.param_groups
        return [self._optimizer, self._optimizer.state, groups, *groups, *(group["params"] for group in groups)]
