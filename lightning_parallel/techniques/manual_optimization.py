"""Backward passes that user code runs: in manual optimization, and in an overridden `LightningModule.backward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_parallel.techniques.gradients.buckets import no_op
from lightning_parallel.techniques.step import StepFn, WrappedStep
from lightning_parallel.techniques.tools.redirect import Pass, intercept_backward

T = TypeVar("T")


class ManualOptimizationStep(WrappedStep):
    """Refuse `loss.backward()` in manual optimization: it weights ranks equally, whatever their numbers of samples."""

    _running = False  # True during `Step.backward`

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`."""
        with intercept_backward(self._require_manual_backward):
            return self.inner.forward(run, *args, **kwargs)

    def _require_manual_backward(self, plain: Callable[..., None], given: Pass) -> None:
        """Replace `torch.autograd.backward` in a step. Allowed: no parameter among `inputs`, and nested passes."""
        inputs = given.inputs
        unrelated = inputs is not None and not any(isinstance(each, nn.Parameter) for each in tree_leaves(inputs))
        if not unrelated and not self._running and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                "training_step calls loss.backward(), which bypasses the averaging over ranks; in manual optimization "
                "call self.manual_backward(loss), and for several losses call it on their sum"
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


class UserBackwardStep(WrappedStep):
    """Reduce gradients at the end of each pass that an overridden `LightningModule.backward` runs.

    Reduced only when the user's `backward` returns, they would overwrite what it changed in them.
    """

    _passed = False  # whether the user's `backward` has called `torch.autograd.backward`

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        self._passed = False
        with intercept_backward(self._lead):
            run()
        if not self._passed:  # gradients came in another way, as from `torch.autograd.grad`
            self.inner.backward(no_op)

    def _lead(self, plain: Callable[..., None], given: Pass) -> None:
        if torch._C._current_graph_task_id() != -1:  # nested in a backward pass, as by a reentrant checkpoint
            plain(*given)
        else:
            self._passed = True
            self.inner.backward(lambda: plain(*given))
