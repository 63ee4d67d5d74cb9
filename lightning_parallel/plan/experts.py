"""Find the modules that hold stacked experts: parameters with one row for each expert, (experts, ...).

Such a module is called once, as `experts(tokens, indices, weights)`. A plan names it (`ParallelPlan(experts=...)`), or
a Hugging Face model's `ep_plan`, or the structure tells: stacked matrices in a module that takes three arguments, or
beside a router, which has one output for each expert. Lists of modules are not divided: only the code around a list
knows which token goes to which module.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn

from lightning_parallel.plan.find import plans, within
from lightning_parallel.plan.plan import ParallelPlan, matching, starred

DISPATCHED = ("ep_dispatch_experts", "moe_tp_experts")
"""The styles by which an `ep_plan` marks a module that holds stacked experts."""

STACK = (
    "stack the weights of a list of experts into parameters of shape (experts, ...) of one module that is called as "
    "experts(tokens, indices, weights), see docs/guide/expert_parallel.md, or leave ExpertParallel out and shard the "
    "list with Zero"
)


@dataclass(frozen=True)
class Experts:
    """A module that holds stacked experts.

    Attributes:
        name: its FQN.
        count: how many experts it holds.
    """

    name: str
    count: int


def find_experts(model: nn.Module, plan: ParallelPlan) -> list[Experts]:
    """Return the modules of a model that hold experts, as far as this rank has them, each once wherever it stands.

    Raises:
        ValueError: a module that the plan names holds no stacked experts.
    """
    found: dict[int, Experts] = {}
    for name, module in (each for pattern in plan.experts for each in matching(model, pattern)):
        if any(True for _ in module.parameters()):
            count = _count(module)
            if count is None:
                raise ValueError(
                    f"{plan.source} says that {name} holds experts, but it has no parameters of the shape (experts, "
                    f"...); {STACK}"
                )
            found.setdefault(id(module), Experts(name, count))
    if plan.experts:
        return list(found.values())
    marked = {
        starred(within(path, pattern))
        for path, _, styles in plans(model, "ep")
        for pattern, style in styles.items()
        if style in DISPATCHED
    }
    for path, owner in model.named_modules():
        for own, module in owner.named_children():
            count, name = _count(module), within(path, own)
            if count is None:
                continue
            # Rows that are scales of heads, (heads, 1, 1), or kernels of torch's own modules are no experts.
            matrices = any(each.dim() > 2 and min(each.shape[1:]) > 1 for each in module.parameters(recurse=False))
            by_structure = matrices and not type(module).__module__.startswith("torch.")
            # A router beside the experts has one row, or one feature, for each of them.
            inside = {*module.parameters()}
            beside = (each for each in owner.parameters() if each not in inside)
            has_router = any(each.dim() == 2 and count in each.shape for each in beside)
            if starred(name) in marked or (by_structure and (has_router or _takes_routes(module))):
                found.setdefault(id(module), Experts(name, count))
    return list(found.values())


def _count(module: nn.Module) -> int | None:
    """Return the number of rows that all parameters of a module itself have, None where it holds no experts."""
    own = list(module.parameters(recurse=False))
    counts = {parameter.shape[0] for parameter in own if parameter.dim() > 1}
    stacked = len(counts) == 1 and counts != {1} and any(parameter.dim() > 2 for parameter in own)
    return counts.pop() if stacked else None


def _takes_routes(module: nn.Module) -> bool:
    """Return whether a module's forward takes three values: tokens, the experts that they chose, and weights."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters) >= 3
