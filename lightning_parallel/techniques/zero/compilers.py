"""What must not be met by a compiler while it reads the user's code, whoever called it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch._dynamo.callback import callback_handler

from lightning_parallel.techniques.gradients.buckets import has_shard


class Compilers:
    """Watches the compilations of `torch.compile` in this process.

    Sharded gradients are put aside meanwhile: torch reads a parameter together with its gradient, and fails where that
    is a DTensor and the parameter is none.

    Args:
        parameters: all that may have sharded gradients.
        begin: called before anything is read.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], begin: Callable[[], None]) -> None:
        self._parameters, self._begin = parameters, begin
        self._aside: list[tuple[nn.Parameter, Tensor | None]] = []
        callback_handler.register_start_callback(self._on_start)
        callback_handler.register_end_callback(self._on_end)

    def _on_start(self, _: Any) -> None:
        self._begin()
        self._aside = [(parameter, parameter.grad) for parameter in self._parameters if has_shard(parameter)]
        for parameter, _gradient in self._aside:
            parameter.grad = None

    def _on_end(self, _: Any) -> None:
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside.clear()

    def close(self) -> None:
        """Nobody calls this one any more."""
        with suppress(ValueError):  # it is closed already
            callback_handler.remove_start_callback(self._on_start)
            callback_handler.remove_end_callback(self._on_end)
