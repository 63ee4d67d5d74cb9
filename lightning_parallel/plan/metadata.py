"""What Hugging Face models say about their own parts, in attributes of the model and of its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lightning_parallel.plan.plan import matching, starred

DISPATCHED = ("ep_dispatch_experts", "moe_tp_experts")
"""The styles by which an `ep_plan` marks a module that holds stacked experts."""


def plans(model: nn.Module, kind: str) -> Iterator[tuple[str, nn.Module, Mapping[Any, Any]]]:
    """Find the plans of a kind, "tp", "ep" or "fsdp": the name of the part that has one, the part, and the plan."""
    for name, part in model.named_modules():
        for owner, attribute in ((part, f"_{kind}_plan"), (getattr(part, "config", None), f"base_model_{kind}_plan")):
            plan = getattr(owner, attribute, None)
            if isinstance(plan, Mapping) and plan:
                yield name, part, plan


def blocks_of(model: nn.Module) -> tuple[tuple[str, ...], str]:
    """Return the patterns of the outermost blocks that the first model inside names, and its class; none where none is.

    They are the classes in `_no_split_modules`, or the patterns with a star of an `fsdp_plan`, as "layers.*".
    """
    for name, part in model.named_modules():
        classes = getattr(part, "_no_split_modules", None)
        if isinstance(classes, (list, tuple, set)):
            named = [child for child, block in part.named_modules() if type(block).__name__ in classes]
            if found := tuple(dict.fromkeys(starred(within(name, child)) for child in _outermost(named))):
                return found, type(part).__name__
    for name, part, plan in plans(model, "fsdp"):
        patterns = [within(name, pattern) for pattern in plan if isinstance(pattern, str) and "*" in pattern]
        if found := tuple(pattern for pattern in patterns if any(True for _ in matching(model, pattern))):
            return found, type(part).__name__
    return (), ""


def experts_of(model: nn.Module) -> set[str]:
    """Return the patterns of the modules that an `ep_plan` marks as stacked experts."""
    return {
        starred(within(name, pattern))
        for name, _, plan in plans(model, "ep")
        for pattern, style in plan.items()
        if style in DISPATCHED
    }


def within(prefix: str, name: str) -> str:
    """Return the name in the full model of a part of a part."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _outermost(names: list[str]) -> list[str]:
    """Return the names that lie in no other one; parents come before their children."""
    kept: list[str] = []
    for name in names:
        if not any(name.startswith(f"{outer}.") for outer in kept):
            kept.append(name)
    return kept
