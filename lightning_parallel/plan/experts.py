"""Find the modules that hold stacked experts: parameters with one row for each expert, [experts, ...].

Such a module is called once, as `experts(tokens, indices, weights)`. A plan names it (`ParallelPlan(experts=...)`), or
a Hugging Face model's `ep_plan` does, or it is recognized by its structure: stacked matrices in a module whose forward
takes three arguments, or beside a router, which has one output for each expert. Lists of modules are not sharded: only
the code around a list knows which token goes to which module.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn

from lightning_parallel.plan.find import plans, within
from lightning_parallel.plan.plan import ParallelPlan, matching, starred

DISPATCHED = ("ep_dispatch_experts", "moe_tp_experts")
"""The styles by which an `ep_plan` marks modules that hold stacked experts."""

STACK = (
    "stack the weights of a list of experts into parameters of shape (experts, ...) of one module, called as "
    "experts(tokens, indices, weights) (see docs/guide/expert_parallel.md), or leave ExpertParallel out and shard the "
    "list with Zero"
)


@dataclass(frozen=True)
class Experts:
    """A module that holds stacked experts.

    Attributes:
        name: its FQN.
        count: number of experts.
    """

    name: str
    count: int


def find_experts(model: nn.Module, plan: ParallelPlan) -> list[Experts]:
    """Return the modules of a model that hold experts on this rank; a module with several names is returned once.

    Raises:
        ValueError: a module that the plan names holds no stacked experts.
    """
    experts: dict[int, Experts] = {}
    for name, module in (match for pattern in plan.experts for match in matching(model, pattern)):
        if any(True for _ in module.parameters()):
            count = _count(module)
            if count is None:
                raise ValueError(
                    f"{plan.source} says that {name} holds experts, but this module has no parameters of shape "
                    f"(experts, ...); {STACK}"
                )
            experts.setdefault(id(module), Experts(name, count))
    if plan.experts:
        return list(experts.values())
    marked = {
        starred(within(path, pattern))
        for path, _, styles in plans(model, "ep")
        for pattern, style in styles.items()
        if style in DISPATCHED
    }
    for path, owner in model.named_modules():
        for child, module in owner.named_children():
            count, name = _count(module), within(path, child)
            if count is None:
                continue
            # Scales of heads, (heads, 1, 1), and kernels of torch's own modules are stacked, too, but no experts.
            matrices = any(each.dim() > 2 and min(each.shape[1:]) > 1 for each in module.parameters(recurse=False))
            by_structure = matrices and not type(module).__module__.startswith("torch.")
            # A router beside the experts has one row, or one feature, for each expert.
            inside = {*module.parameters()}
            beside = (weight for weight in owner.parameters() if weight not in inside)
            has_router = any(weight.dim() == 2 and count in weight.shape for weight in beside)
            if starred(name) in marked or (by_structure and (has_router or _takes_routes(module))):
                experts.setdefault(id(module), Experts(name, count))
    return list(experts.values())


def _count(module: nn.Module) -> int | None:
    """Return the number of rows that all of a module's direct parameters have; None if it holds no stacked experts."""
    parameters = list(module.parameters(recurse=False))
    counts = {parameter.shape[0] for parameter in parameters if parameter.dim() > 1}
    stacked = len(counts) == 1 and counts != {1} and any(parameter.dim() > 2 for parameter in parameters)
    return counts.pop() if stacked else None


def _takes_routes(module: nn.Module) -> bool:
    """Return whether a module's forward takes three values: tokens, the indices of their experts, and weights."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters) >= 3
