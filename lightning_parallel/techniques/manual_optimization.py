"""Backward passes that the user's code runs: in steps of manual optimization, and in a `backward` of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_parallel.techniques.gradients.buckets import no_op
from lightning_parallel.techniques.step import StepFn, WrappedStep
from lightning_parallel.techniques.tools.redirect import Pass, backward_led

T = TypeVar("T")


class ManualOptimizationStep(WrappedStep):
    """Refuses plain backward passes of manual optimization: in them, samples of all ranks would count alike."""

    _running = False

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`."""
        with backward_led(self._require_manual_backward):
            return self.inner.forward(run, *args, **kwargs)

    def _require_manual_backward(self, plain: Callable[..., None], given: Pass) -> None:
        """Stands for `torch.autograd.backward`, which also differentiates by no parameter, and within a pass."""
        inputs = given.inputs
        by_others = inputs is not None and not any(isinstance(each, nn.Parameter) for each in tree_leaves(inputs))
        if not by_others and not self._running and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                "training_step calls loss.backward(), which tells ranks nothing of the pass; in manual optimization "
                "call self.manual_backward(loss), and for several losses self.manual_backward of their sum"
            )
        plain(*given)

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        self._running = True
        self.before_backward()
        try:
            self.inner.backward(run)
        finally:
            self._running = False


class OwnBackwardStep(WrappedStep):
    """Leads the passes that a `backward` of the user's own runs: gradients are final when each pass returns.

    Otherwise they would be final when all of the user's `backward` returns, and its changes to them would be lost.
    """

    _passed = False

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        self._passed = False
        with backward_led(self._lead):
            run()
        if not self._passed:  # it gave gradients in another way
            self.inner.backward(no_op)

    def _lead(self, plain: Callable[..., None], given: Pass) -> None:
        if torch._C._current_graph_task_id() != -1:  # a pass within one
            plain(*given)
        else:
            self._passed = True
            self.inner.backward(lambda: plain(*given))
