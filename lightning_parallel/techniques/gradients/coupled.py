"""Whether an optimizer steps each parameter by itself, found before the first step by trying it on a few copies.

A rank of a pipeline has the gradients of its own stage. An optimizer that takes one norm over all of them, as LAMB's
and SAM's do, or one direction for all, as LBFGS, would take that of the stage without a word. What it computes cannot
be read off its class, so a copy of it steps a few small parameters, once more with other values and gradients of some:
where the rest moves otherwise, parameters are coupled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.techniques.gradients.elementwise import is_elementwise

STEPS = 2  # what the first one keeps, as a running norm, may show in the second only
OTHER = 1e3  # times values and gradients: far above any threshold at which norms are clipped
CURVATURE = 0.3  # of the losses whose gradients these are; with 1, a plain step would end where they are zero
OF_THE_RUN = ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # schedulers and users set them


def couples(optimizer: Optimizer) -> bool:
    """Whether the step of one parameter depends on another one or its gradient; False also where no trial is possible.

    Args:
        optimizer: before its first step; it is not changed. Parameters may lie on meta: shapes are enough.
    """
    if is_elementwise(optimizer):
        return False
    for asks_for_closure in (False, True):
        try:
            return _couples(optimizer, asks_for_closure)
        except Exception:  # a user's code, which may need what copies of a few lack
            continue
    return False


def _couples(optimizer: Optimizer, asks_for_closure: bool) -> bool:
    few = [*_few(optimizer)]
    if _are_coupled(few, lambda changed: _stepped(optimizer, few, changed, asks_for_closure)):
        return True
    if not asks_for_closure:
        return False
    evaluations: list[None] = []
    _stepped(optimizer, few, set(), True, evaluations)
    # What looks for the best step, as LBFGS may along a line, takes none where all losses are alike.
    searches = len(evaluations) > STEPS
    return searches and _are_coupled(few, lambda changed: _stepped(optimizer, few, changed, True, evaluations, True))


def _are_coupled(few: list[nn.Parameter], stepped: Callable[[set[int]], list[Tensor]]) -> bool:
    as_ever = stepped(set())
    for changed in _halves(len(few)):
        moved = stepped(changed)
        if any(not torch.equal(as_ever[at], moved[at]) for at in range(len(few)) if at not in changed):
            return True
    return False


def _few(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """The two smallest parameters of each number of dimensions in each group: optimizers tell matrices from vectors."""
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        for dims in {parameter.dim() for parameter in trained}:
            yield from sorted((each for each in trained if each.dim() == dims), key=Tensor.numel)[:2]


def _halves(count: int) -> Iterator[set[int]]:
    """Sets of numbers such that for any two there is one with the first and without the second."""
    for bit in range((count - 1).bit_length()):
        for side in (0, 1):
            yield {number for number in range(count) if number >> bit & 1 == side}


def _stepped(
    optimizer: Optimizer,
    few: list[nn.Parameter],
    changed: set[int],
    asks_for_closure: bool,
    evaluations: list[None] | None = None,
    with_loss: bool = False,
) -> list[Tensor]:
    """The few after steps of a copy of the optimizer, from `OTHER` values and gradients of those that are changed.

    Args:
        optimizer: which is tried.
        few: of its parameters.
        changed: the numbers of those that start elsewhere.
        asks_for_closure: whether its step does.
        evaluations: gets an element for each time that a step evaluates it.
        with_loss: whether the closure returns the loss whose gradients these are. Else it is always one, for the loss
            is the same on all stages, and no way for one to learn of another.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        scales = [OTHER if at in changed else 1 for at in range(len(few))]
        copies = [
            nn.Parameter(torch.randn(each.shape, dtype=each.dtype) * x) for each, x in zip(few, scales, strict=True)
        ]
        slopes = [torch.randn(each.shape, dtype=each.dtype) * scale for each, scale in zip(few, scales, strict=True)]
        twin = _twin(optimizer, dict(zip(map(id, few), copies, strict=True)))

        def compute() -> Tensor:
            loss = torch.zeros(())
            for copy, slope in zip(copies, slopes, strict=True):
                copy.grad = copy.detach() * CURVATURE + slope
                loss = loss + (copy.detach() * (copy.detach() * CURVATURE / 2 + slope)).sum()
            return loss if with_loss else torch.ones(())

        def closure() -> Tensor:
            if evaluations is not None:
                evaluations.append(None)
            return compute()

        for _ in range(STEPS):
            compute()
            twin.step(*([closure] if asks_for_closure else []))
    return [copy.detach() for copy in copies]


def _twin(optimizer: Optimizer, copies: dict[int, nn.Parameter]) -> Any:
    """A copy of an optimizer and all that it holds, of which the few have copies and other parameters no memory."""
    memo: dict[int, Any] = {**copies}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            memo.setdefault(
                id(parameter), nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), False)
            )
    twin = memo[id(optimizer)] = object.__new__(type(optimizer))  # Optimizer's own way to copy leaves out attributes
    vars(twin).update(
        deepcopy({name: value for name, value in vars(optimizer).items() if name not in OF_THE_RUN}, memo)
    )
    for name in OF_THE_RUN[1:]:
        vars(twin)[name] = OrderedDict()
    kept = {id(copy) for copy in copies.values()}
    for group in twin.param_groups:
        group["params"][:] = [parameter for parameter in group["params"] if id(parameter) in kept]
    return twin
