"""Gradients within a step under ZeRO stage 3, where the step runs its backward itself or reads those of earlier ones.

`fully_shard` leaves gradients on shards, while a step sees whole parameters. So between the backward passes of a step a
whole parameter has the shard's gradient for its `grad`, as a `GlobalShard`, which computes as the whole.

| of a whole parameter, between backward passes in a step | what is done                                          |
|---------------------------------------------------------|-------------------------------------------------------|
| its gradient is read, or changed in place               | done by `GlobalShard`, in the shard's memory          |
| its gradient is set to None                             | the shard has none either                             |
| its gradient is set to a tensor                         | made a mean over the ranks, as by a backward          |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from lightning_parallel.techniques.tools.global_shard import GlobalShard, global_of


class StepsGradients:
    """Puts the gradients of shards on whole parameters, and takes them back.

    Args:
        pairs: the whole parameters, each with its shard.
    """

    def __init__(self, pairs: Callable[[], list[tuple[Any, Any]]]) -> None:
        self._pairs = pairs
        self._shown: list[tuple[Any, Any, Any]] = []

    def show(self) -> None:
        """A backward within a step is over, or a step begins."""
        if not self._shown:
            found = [(whole, shard, shard.grad) for whole, shard in self._pairs()]
            self._shown = [(whole, shard, global_of(it)) for whole, shard, it in found if isinstance(it, DTensor)]
            for whole, _, gradient in self._shown:
                whole.grad = gradient

    def settle(self) -> bool:
        """Take gradients off the wholes, before another backward, an optimizer's step, or the end of the step.

        Returns:
            Whether the step gave one that no backward computed: it stays on the whole.
        """
        given, shown = False, self._shown
        self._shown = []
        for whole, shard, before in shown:
            now = whole.grad
            if now is not before:
                shard.grad = now if isinstance(now, GlobalShard) and now.placements == before.placements else None
                given = given or (now is not None and shard.grad is None)
            if now is before or shard.grad is not None:
                whole.grad = None
        return given
