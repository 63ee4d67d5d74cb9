"""What compares samples with each other gets the samples of all ranks: balance of routers, contrastive losses.

A loss that is no mean over samples, computed on each rank's part of a batch, is another one than that of the batch. So
its function is given tensors that look like those of the whole batch, divided along their first dimension, and gives
all ranks the same. Which functions: modules that a plan names (`ParallelPlan(whole_batch=...)`), and those by which
Hugging Face's models balance their routers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from lightning_parallel.collectives.by_elements import counted, entered
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.functional import parts_of_all
from lightning_parallel.plan.plan import ParallelPlan, matching
from lightning_parallel.techniques.divided.functions import FunctionsGetWholes
from lightning_parallel.techniques.divided.tensor import Divided, is_divided
from lightning_parallel.techniques.division import Division
from lightning_parallel.techniques.step import BatchContext, Step, StepFn, WrappedStep
from lightning_parallel.techniques.tools.means import unwatched
from lightning_parallel.techniques.tools.redirect import redirect_forward

T = TypeVar("T")

BALANCING = "load_balancing_loss_func"
"""The function of Hugging Face's that balances routers, in the file of each model that has it."""


class WholeBatch(Division):
    """A model of which some functions see the samples of all ranks.

    Args:
        model: the user's module.
        ranks: that read different samples.
        plan: names modules.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, plan: ParallelPlan) -> None:
        super().__init__(model)
        self.ranks = ranks
        self.counts = True
        """Whether this rank's samples count; where a batch had none left for it, it has one for the form."""
        modules = {id(module): module for pattern in plan.whole_batch for _, module in matching(model, pattern)}
        for module in modules.values():
            redirect_forward(module, self.led)
        names = {type(module).__module__ for module in model.modules()}  # a class made by exec may have any
        files = [sys.modules[name] for name in names if name in sys.modules]
        self.files = [file for file in files if BALANCING in vars(file)]
        self.acts = bool(modules or self.files)
        self._functions = FunctionsGetWholes()

    def run(self, run: StepFn[T]) -> StepFn[T]:
        """Leads the functions of Hugging Face's for the time of the user's step."""

        def led(*args: Any, **kwargs: Any) -> T:
            before = [vars(file)[BALANCING] for file in self.files]
            for file, function in zip(self.files, before, strict=True):
                vars(file)[BALANCING] = self.led(function)
            try:
                return run(*args, **kwargs)
            finally:
                for file, function in zip(self.files, before, strict=True):
                    vars(file)[BALANCING] = function

        return led if self.files else run

    def step(self, step: Step) -> Step:
        """Notes whether samples count."""
        return CountedStep(step, self)

    def led(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, on the whole batch."""

        @functools.wraps(function)
        def on_whole_batch(*args: Any, **kwargs: Any) -> Any:
            with self._functions, unwatched():
                leaves, form = tree_flatten((args, kwargs))
                leaves = [each.whole("the whole batch") if is_divided(each) else each for each in leaves]
                places = [place for place, each in enumerate(leaves) if isinstance(each, Tensor) and each.dim()]
                if places:
                    lengths = [len(leaves[place]) * self.counts for place in places]
                    sizes = parts_of_all(torch.tensor(lengths, device=leaves[places[0]].device), self.ranks.group)
                    for place, each in zip(places, sizes.t().tolist(), strict=True):  # its length on each rank
                        ends = torch.tensor(each).cumsum(0).tolist()
                        runs = [[(end - size, end)] if size else [] for size, end in zip(each, ends, strict=True)]
                        own = counted(leaves[place][: each[self.ranks.rank]], self.ranks.count)
                        leaves[place] = Divided(own, {0: self.ranks.elements(ends[-1], runs)})
                    args, kwargs = tree_unflatten(leaves, form)
                return tree_map_only(Tensor, self._own, function(*args, **kwargs))

        return cast(Any, torch.compiler.disable)(on_whole_batch)  # type: ignore[no-any-return]  # it sends messages

    def _own(self, result: Tensor) -> Tensor:
        """This rank's samples of a result, or what is the same for all, which each rank uses in its own loss."""
        share = 1 / self.ranks.count
        if not is_divided(result):
            return entered(counted(result, share), self.ranks) if result.requires_grad else result
        own = counted(result.own, share)
        if self.counts:
            return own
        filled = own.new_zeros(1, *result.shape[1:])
        return filled + own.sum() if own.requires_grad else filled  # of no rows: only so that backward comes by


class CountedStep(WrappedStep):
    """A step that says whether this rank's samples count."""

    def __init__(self, inner: Step, whole: WholeBatch) -> None:
        super().__init__(inner)
        self._whole = whole

    def begin_batch(self, batch: BatchContext) -> None:
        """See `Step.begin_batch`."""
        self._whole.counts = batch.weight > 0
        self.inner.begin_batch(batch)
