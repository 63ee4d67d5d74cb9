"""Backward passes that the user's code runs: in steps of manual optimization, and in a `backward` of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_parallel.techniques.gradients.buckets import nothing
from lightning_parallel.techniques.step import Coming, Run, Step, WrappedStep
from lightning_parallel.techniques.tools.redirect import Pass, backward_led

T = TypeVar("T")

Differentiate = Callable[[Tensor, Tensor, Callable[[Tensor], None]], None]
"""Runs, inside of `Step.backward`, the backward pass of a loss: the loss, the same scaled, and what goes backward."""


class ManualOptimizationStep(WrappedStep):
    """Leads plain backward passes of manual optimization the way of `manual_backward`, around all techniques.

    Without it a technique would see that there is one by the first gradient that comes, on the ranks to which one does,
    and the samples of all ranks would count alike, however many there are.

    Args:
        inner: the step of all techniques.
        differentiate: runs the passes.
    """

    def __init__(self, inner: Step, differentiate: Differentiate) -> None:
        super().__init__(inner)
        self._differentiate, self._running = differentiate, False

    def expect(self, coming: Coming) -> None:
        """See `Step.expect`."""
        self.inner.expect(replace(coming, asks=True))

    def forward(self, run: Run[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`."""
        with backward_led(self._lead):
            return self.inner.forward(run, *args, **kwargs)

    def _lead(self, plain: Callable[..., None], given: Pass) -> None:
        """Stands for `torch.autograd.backward`, which also differentiates by no parameter, and within a pass."""
        inputs, gradients = given.inputs, given.grad_variables
        asked = inputs is not None and not any(isinstance(each, nn.Parameter) for each in tree_leaves(inputs))
        if asked or self._running or torch._C._current_graph_task_id() != -1:
            plain(*given)
            return
        loss = _one_loss(given.tensors, given.grad_tensors if gradients is None else gradients)
        options = {"retain_graph": given.retain_graph, "create_graph": given.create_graph, "inputs": inputs}
        self._differentiate(loss, loss, partial(plain, **options))

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        self._running = True
        self.before_backward()
        try:
            self.inner.backward(run)
        finally:
            self._running = False


class OwnBackwardStep(WrappedStep):
    """Leads the passes that a `backward` of the user's own runs: gradients are final when each of them returns.

    Without it they would be so when the whole of it returns, and what it does to them be lost.

    Args:
        inner: the step of all techniques.
    """

    def __init__(self, inner: Step) -> None:
        super().__init__(inner)
        self._passed = False

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        self._passed = False
        with backward_led(self._lead):
            run()
        if not self._passed:  # it gave gradients in another way
            self.inner.backward(nothing)

    def _lead(self, plain: Callable[..., None], given: Pass) -> None:
        if torch._C._current_graph_task_id() != -1:  # a pass within one
            plain(*given)
            return
        self._passed = True
        self.inner.backward(lambda: plain(*given))


def _one_loss(tensors: Tensor | Sequence[Tensor], gradients: Any) -> Tensor:
    """The loss whose gradients are those of several tensors, of which each has the gradient that is given for it."""
    several = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [gradients] * len(several) if gradients is None or isinstance(gradients, Tensor) else list(gradients)
    losses = [
        tensor if gradient is None else (tensor * gradient).sum()
        for tensor, gradient in zip(several, given, strict=True)
    ]
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()
