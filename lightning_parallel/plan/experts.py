"""Which modules hold experts, and in which of two forms: stacked in parameters, or as a list of modules.

| form | what it is | how it is called |
|---|---|---|
| stacked | parameters with one row for each expert, (experts, ...) | once: `experts(tokens, indices, weights)` |
| listed | a ModuleList or ModuleDict of modules that are alike | each by itself, with the tokens that chose it |

A plan names them (`ParallelPlan(experts=...)`). Else a Hugging Face model's `ep_plan` does, or the structure: stacked
matrices in a module that takes three arguments; or a list next to a router, which has one output for each of the list.
Where none of these is, stacked matrices next to a router, however they are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from lightning_parallel.plan.plan import ParallelPlan, matching, starred

DISPATCHED = ("ep_dispatch_experts", "moe_tp_experts")
"""The styles by which Hugging Face's `ep_plan` marks a module that holds stacked experts."""


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
    """The modules of a model that hold experts, as far as this rank has them, each once wherever it stands.

    Raises:
        ValueError: a module that the plan names holds no experts in a known form.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    return list({id(modules[each.name]): each for each in reversed(_found(model, plan))}.values())[::-1]


def _found(model: nn.Module, plan: ParallelPlan) -> list[Experts]:
    if plan.experts:
        named = (found for pattern in plan.experts for found in matching(model, pattern))
        return [_require(name, module, plan) for name, module in named if any(True for _ in module.parameters())]
    marked = set(_marked(model))
    found = list(_beside_routers(model, plan))
    for name, module in model.named_modules():
        if starred(name) in marked or (_has_matrices(module) and _takes_routes(module)):
            found += _stacked(name, module)
    return found or list(_stacked_beside_routers(model))


def _require(name: str, module: nn.Module, plan: ParallelPlan) -> Experts:
    found = _stacked(name, module) or _listed(name, module)
    if not found:
        raise ValueError(
            f"{plan.source} says that {name} holds experts, but it is neither a module with parameters of the shape "
            "(experts, ...) nor a ModuleList or ModuleDict of several modules that are alike; name such a one in "
            "ParallelPlan(experts=...), or leave expert parallelism out"
        )
    return found[0]


def _marked(model: nn.Module) -> Iterator[str]:
    """The patterns that the metadata of Hugging Face's models mark as modules of experts."""
    for name, part in model.named_modules():
        plans = [getattr(part, "_ep_plan", None), getattr(getattr(part, "config", None), "base_model_ep_plan", None)]
        for own in plans:
            for pattern, style in own.items() if isinstance(own, Mapping) else ():
                if style in DISPATCHED:
                    yield f"{starred(name)}.{pattern}" if name else pattern


def _stacked(name: str, module: nn.Module) -> list[Experts]:
    """The module, if each of its own parameters has one row for each expert, and one has a matrix."""
    own = list(module.parameters(recurse=False))
    counts = {parameter.shape[0] for parameter in own if parameter.dim() > 1}
    if len(counts) != 1 or not any(parameter.dim() > 2 for parameter in own):
        return []
    count = counts.pop()
    return [Experts(name, "stacked", count)] if count > 1 else []


def _has_matrices(module: nn.Module) -> bool:
    """Whether a parameter has a matrix in each row; scales of heads, (heads, 1, 1), and kernels of size 1 have none."""
    return any(each.dim() > 2 and min(each.shape[1:]) > 1 for each in module.parameters(recurse=False))


def _takes_routes(module: nn.Module) -> bool:
    """Whether a module's forward takes three values: tokens, the experts that they chose, and weights."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters) >= 3


def _listed(name: str, module: nn.Module) -> list[Experts]:
    """The module, if it is a list of several modules that are alike."""
    experts = listed_in(module) if isinstance(module, (nn.ModuleList, nn.ModuleDict)) else []
    if len(experts) < 2:
        return []
    forms = {
        (type(each), tuple((own, parameter.shape) for own, parameter in each.named_parameters())) for each in experts
    }
    alike = len(forms) == 1 and any(True for _ in experts[0].parameters())
    return [Experts(name, "listed", len(experts))] if alike else []


def listed_in(module: nn.Module) -> list[nn.Module]:
    """The experts in a list; where it has a forward of its own, nothing without parameters is one, as its dropout."""
    children = list(module.children())
    if type(module).forward is nn.Module.forward:
        return children
    return [child for child in children if any(True for _ in child.parameters())]


def _beside_routers(model: nn.Module, plan: ParallelPlan) -> Iterator[Experts]:
    """Lists in blocks that have a router beside them: something with one row, or one feature, for each member."""
    blocks = tuple(f"{name}." for name in plan.find_blocks(model))
    for name, owner in model.named_modules():
        for own, child in owner.named_children():
            found = _listed(f"{name}.{own}" if name else own, child)
            if found and (not blocks or found[0].name.startswith(blocks)) and _routes(owner, child, found[0].count):
                yield from found


def _stacked_beside_routers(model: nn.Module) -> Iterator[Experts]:
    """Stacked matrices beside a router; torch's own modules, as convolutions, have kernels and no experts."""
    for name, owner in model.named_modules():
        for own, child in owner.named_children():
            found = _stacked(f"{name}.{own}" if name else own, child)
            is_own = _has_matrices(child) and not type(child).__module__.startswith("torch.")
            if found and is_own and _routes(owner, child, found[0].count):
                yield from found


def _routes(owner: nn.Module, experts: nn.Module, count: int) -> bool:
    beside = [part for part in owner.children() if part is not experts]
    parameters = [*owner.parameters(recurse=False), *(p for part in beside for p in part.parameters())]
    return any(parameter.dim() == 2 and count in parameter.shape for parameter in parameters)
