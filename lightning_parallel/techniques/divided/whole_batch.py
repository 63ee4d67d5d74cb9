"""Functions that compare samples with each other, on the batch of all ranks: router balancing, contrastive losses.

A loss that is no mean over samples differs between a rank's part of a batch and the full batch. So its function gets
tensors with the shape of the full batch, sharded along their first dimension, and returns the same result on all ranks.
These functions are the modules that a plan names (`ParallelPlan(whole_batch=...)`), and those that balance the routers
of Hugging Face's models.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from lightning_parallel.collectives.conjugate_collectives import counted, entered
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.functional import all_gather_stacked
from lightning_parallel.plan.plan import ParallelPlan, matching
from lightning_parallel.techniques.divided.functions import FunctionsGetFullTensors
from lightning_parallel.techniques.divided.tensor import Divided, is_divided
from lightning_parallel.techniques.division import Division
from lightning_parallel.techniques.step import BatchContext, Step, StepFn, WrappedStep
from lightning_parallel.techniques.tools.means import no_recording
from lightning_parallel.techniques.tools.redirect import redirect_forward

T = TypeVar("T")

BALANCING = "load_balancing_loss_func"
"""Name of Hugging Face's function that balances routers, in the file of each model that has one."""


class WholeBatch(Division):
    """Model of which some functions get the samples of all ranks.

    Args:
        model: the user's module.
        ranks: the ranks that read different samples.
        plan: names the modules.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, plan: ParallelPlan) -> None:
        super().__init__(model)
        self.ranks = ranks
        self.counts = True
        """Whether this rank's samples count; if the batch had none left for this rank, it has a dummy one."""
        modules = {id(module): module for pattern in plan.whole_batch for _, module in matching(model, pattern)}
        for module in modules.values():
            redirect_forward(module, self.led)
        names = {type(module).__module__ for module in model.modules()}  # a class made by exec may have any name here
        files = [sys.modules[name] for name in names if name in sys.modules]
        self.files = [file for file in files if BALANCING in vars(file)]
        self.acts = bool(modules or self.files)
        self._functions = FunctionsGetFullTensors()

    def run(self, run: StepFn[T]) -> StepFn[T]:
        """Redirect Hugging Face's functions during the user's step."""

        def redirected(*args: Any, **kwargs: Any) -> T:
            before = [vars(file)[BALANCING] for file in self.files]
            for file, function in zip(self.files, before, strict=True):
                vars(file)[BALANCING] = self.led(function)
            try:
                return run(*args, **kwargs)
            finally:
                for file, function in zip(self.files, before, strict=True):
                    vars(file)[BALANCING] = function

        return redirected if self.files else run

    def step(self, step: Step) -> Step:
        """Wrap the step in one that sets whether samples count."""
        return CountedStep(step, self)

    def led(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function such that it runs on the batch of all ranks. Its call is a collective over them."""

        @functools.wraps(function)
        def on_whole_batch(*args: Any, **kwargs: Any) -> Any:
            with self._functions, no_recording():
                leaves, form = tree_flatten((args, kwargs))
                leaves = [each.whole("the whole batch") if is_divided(each) else each for each in leaves]
                indices = [index for index, each in enumerate(leaves) if isinstance(each, Tensor) and each.dim()]
                if indices:
                    lengths = [len(leaves[index]) * self.counts for index in indices]
                    sizes = all_gather_stacked(
                        torch.tensor(lengths, device=leaves[indices[0]].device), self.ranks.group
                    )
                    for index, each in zip(indices, sizes.t().tolist(), strict=True):  # its length on each rank
                        ends = torch.tensor(each).cumsum(0).tolist()
                        runs = [[(end - size, end)] if size else [] for size, end in zip(each, ends, strict=True)]
                        own = counted(leaves[index][: each[self.ranks.rank]], self.ranks.count)
                        leaves[index] = Divided(own, {0: self.ranks.elements(ends[-1], runs)})
                    args, kwargs = tree_unflatten(leaves, form)
                return tree_map_only(Tensor, self._own, function(*args, **kwargs))

        return cast(Any, torch.compiler.disable)(on_whole_batch)  # type: ignore[no-any-return]  # it communicates

    def _own(self, result: Tensor) -> Tensor:
        """Return this rank's samples of a result, or the replicated result, which each rank uses in its own loss."""
        share = 1 / self.ranks.count
        if not is_divided(result):
            return entered(counted(result, share), self.ranks) if result.requires_grad else result
        own = counted(result.own, share)
        if self.counts:
            return own
        filled = own.new_zeros(1, *result.shape[1:])
        return filled + own.sum() if own.requires_grad else filled  # a sum over no rows: connects it to backward only


class CountedStep(WrappedStep):
    """Step that sets whether this rank's samples count."""

    def __init__(self, inner: Step, whole: WholeBatch) -> None:
        super().__init__(inner)
        self._whole = whole

    def begin_batch(self, batch: BatchContext) -> None:
        """See `Step.begin_batch`."""
        self._whole.counts = batch.weight > 0
        self.inner.begin_batch(batch)
