"""Which modules hold experts, and in which of two forms: stacked in parameters, or as a list of modules.

| form | what it is | how it is called |
|---|---|---|
| stacked | parameters with one row for each expert, (experts, ...) | once: `experts(tokens, indices, weights)` |
| listed | a ModuleList or ModuleDict of modules that are alike | each by itself, with the tokens that chose it |

A plan names them (`ParallelPlan(experts=...)`). Else a Hugging Face model's `ep_plan` does, or the structure: stacked
matrices in a module that takes three arguments, or either form beside a router, which has one output for each expert.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Literal

from torch import nn

from lightning_parallel.plan.metadata import experts_of, within
from lightning_parallel.plan.plan import ParallelPlan, matching, starred


@dataclass(frozen=True)
class Experts:
    """A module that holds experts.

    Attributes:
        name: its FQN.
        form: see above.
        count: how many experts it holds.
    """

    name: str
    form: Literal["stacked", "listed"]
    count: int


def find_experts(model: nn.Module, plan: ParallelPlan) -> list[Experts]:
    """Return the modules of a model that hold experts, as far as this rank has them, each once wherever it stands.

    Raises:
        ValueError: a module that the plan names holds no experts in a known form.
    """
    found: dict[int, Experts] = {}
    if plan.experts:
        for name, module in (each for pattern in plan.experts for each in matching(model, pattern)):
            if any(True for _ in module.parameters()):
                found.setdefault(id(module), _require(name, module, plan))
        return list(found.values())
    marked = experts_of(model)
    blocks = tuple(f"{name}." for name in plan.find_blocks(model))
    for path, owner in model.named_modules():
        for own, module in owner.named_children():
            name = within(path, own)
            experts = _form_of(name, module)
            if experts is None:
                continue
            in_block = not blocks or name.startswith(blocks)
            routed = _routes(owner, module, experts.count) and (experts.form == "stacked" or in_block)
            by_structure = routed or (experts.form == "stacked" and _takes_routes(module))
            if starred(name) in marked or (by_structure and _has_matrices(module)):
                found.setdefault(id(module), experts)
    return list(found.values())


def _require(name: str, module: nn.Module, plan: ParallelPlan) -> Experts:
    found = _form_of(name, module)
    if found is None:
        raise ValueError(
            f"{plan.source} says that {name} holds experts, but it is neither a module with parameters of the shape "
            "(experts, ...) nor a ModuleList or ModuleDict of several modules that are alike; name such a one in "
            "ParallelPlan(experts=...), or leave expert parallelism out"
        )
    return found


def _form_of(name: str, module: nn.Module) -> Experts | None:
    """Return a module as experts: stacked if each of its own parameters has a row for each, listed if it is a list."""
    own = list(module.parameters(recurse=False))
    counts = {parameter.shape[0] for parameter in own if parameter.dim() > 1}
    if len(counts) == 1 and any(parameter.dim() > 2 for parameter in own) and counts != {1}:
        return Experts(name, "stacked", counts.pop())
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return None
    children = list(module.children())
    if type(module).forward is not nn.Module.forward:  # its own forward may use more than experts, as a dropout
        children = [child for child in children if any(True for _ in child.parameters())]
    forms = {(type(each), tuple((own, it.shape) for own, it in each.named_parameters())) for each in children}
    alike = len(children) > 1 and len(forms) == 1 and any(True for _ in children[0].parameters())
    return Experts(name, "listed", len(children)) if alike else None


def _has_matrices(module: nn.Module) -> bool:
    """Return whether rows of parameters are matrices: those of scales of heads, (heads, 1, 1), and kernels are not."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return True
    stacked = any(each.dim() > 2 and min(each.shape[1:]) > 1 for each in module.parameters(recurse=False))
    return stacked and not type(module).__module__.startswith("torch.")


def _takes_routes(module: nn.Module) -> bool:
    """Return whether a module's forward takes three values: tokens, the experts that they chose, and weights."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters) >= 3


def _routes(owner: nn.Module, experts: nn.Module, count: int) -> bool:
    """Return whether something beside experts has one row, or one feature, for each of them."""
    beside = [part for part in owner.children() if part is not experts]
    parameters = [*owner.parameters(recurse=False), *(p for part in beside for p in part.parameters())]
    return any(parameter.dim() == 2 and count in parameter.shape for parameter in parameters)
