"""Gradients of the batch before, while a step already computes those of its own, as that of a pipeline does.

Lightning sets them to zero between a step and its backward, so a step's code can read them, as it does on one device.
Hardly any does. Where none has when the first new gradient comes, the old ones go, and there is one copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor, nn
from typing_extensions import Self

from lightning_parallel.techniques.gradients.asked import OWN, ask, ask_no_more, is_inner, watch


class OldGradients:
    """Lets go of the gradients of the batch before, unless the step reads one of them first.

    By the first new gradient all code of the step has run on one microbatch. So a read in every batch, or in some by
    their number, is seen in time; one that only later microbatches come to is an error.

    | state    | a parameter's gradient is read | `release`                            |
    |----------|--------------------------------|--------------------------------------|
    | unread   | read, from then on             | released, from then on               |
    | read     | as on one device               | nothing: they stay in this batch     |
    | released | RuntimeError                   | nothing                              |

    Args:
        release: sets to zero what would be set to zero before backward; None: not in this batch, or somebody else may
            look at it before.
    """

    def __init__(self, release: Callable[[], None] | None = None) -> None:
        self._release = release
        self._read = self._released = False
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        """From now on reads are seen."""
        if self._release is not None and not ask(watch(self._seen, OWN.__set__)):  # somebody else looks already
            self._release = None
        return self

    def __exit__(self, *_: object) -> None:
        """The step is over."""
        if self._release is not None:
            ask_no_more()

    def release(self) -> None:
        """A new gradient is about to be computed."""
        if self._release is not None and not self._read and not self._released:
            self._release()  # which reads them too
            self._released = True

    def _seen(self, parameter: nn.Parameter) -> Tensor | None:
        gradient: Tensor | None = OWN.__get__(parameter)
        if not is_inner(__name__):
            self._read = True
            if self._released and gradient is None and threading.get_ident() == self._thread:
                raise RuntimeError(
                    "the step reads the gradient of a parameter in a later microbatch, and not in the first one, so "
                    "that of the batch before is gone; read gradients in every microbatch or in none, or in a hook, as "
                    "on_after_backward; with a hook on_before_zero_grad of the module they stay in every step"
                )
        return gradient
