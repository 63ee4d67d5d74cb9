"""Finds the plan of a model: its own word, a Hugging Face model's metadata, or its structure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from dataclasses import replace

from torch import nn

from lightning_parallel.plan.plan import ParallelPlan, matching, require_plan, starred


def find_plan(module: nn.Module, given: ParallelPlan | None = None) -> ParallelPlan:
    """Finds the plan of a model: the one given, its own `parallel_plan()`, its Hugging Face metadata, or its structure.

    One that names no blocks adds to what would be found without it.

    Args:
        module: the whole model, before any technique touched it.
        given: the strategy's `plan=` argument.
    """
    own = getattr(module, "parallel_plan", None)
    if given is not None:
        return given if given.blocks else given.over(find_plan(module))
    if not callable(own):
        return _guessed(module)
    source = f"{type(module).__name__}.parallel_plan()"
    plan = replace(require_plan(own(), source), source=source, inferred=False)
    return plan if plan.blocks else plan.over(_guessed(module))


def _guessed(module: nn.Module) -> ParallelPlan:
    return from_metadata(module) or infer(module)


def from_metadata(module: nn.Module) -> ParallelPlan | None:
    """The plan that a Hugging Face model's own metadata gives (`_no_split_modules`), None where there is none."""
    for name, part in module.named_modules():
        classes = getattr(part, "_no_split_modules", None)
        if not isinstance(classes, (list, tuple, set)):
            continue
        found = _outermost([child for child, block in part.named_modules() if type(block).__name__ in classes])
        patterns = tuple(dict.fromkeys(starred(f"{name}.{child}" if name else child) for child in found))
        if patterns:
            source = f"the metadata of {type(part).__name__}"
            return ParallelPlan(blocks=patterns, source=source, inferred=True)
    return None


def _outermost(names: list[str]) -> list[str]:
    """The names among these that lie in no other one; parents come before their children."""
    kept: list[str] = []
    for name in names:
        if not any(name.startswith(f"{outer}.") for outer in kept):
            kept.append(name)
    return kept


def infer(module: nn.Module) -> ParallelPlan:
    """The plan that a model's structure suggests: its blocks are the largest list of layers, best of one class."""
    source = f"the structure of {type(module).__name__}"
    alike, mixed = _largest(module, _is_list_of_blocks), _largest(module, _is_list_of_layers)
    largest = mixed if alike is None or (mixed is not None and 2 * alike[1] < mixed[1]) else alike
    if largest is None:
        return ParallelPlan(source=source, inferred=True)
    return ParallelPlan(blocks=_blocks_in(module, largest[0]), source=source, inferred=True)


def _blocks_in(module: nn.Module, layers: str) -> tuple[str, ...]:
    """The pattern of the blocks in a list of layers, or their names where some stand in a list before this one too."""
    blocks = f"{layers}.*" if layers else "*"
    first = {part: name for name, part in module.named_modules()}
    names = tuple(first[part] for part in module.get_submodule(layers).children())
    if not {*names} <= {name for name, _ in matching(module, blocks)}:
        return names
    while any(isinstance(block, (nn.ModuleList, nn.ModuleDict)) for _, block in matching(module, blocks)):
        blocks += ".*"  # a list of layers, each a list of parts: those are what is called
    return (blocks,)


def running_blocks(plan: ParallelPlan, module: nn.Module, called: Collection[str]) -> dict[str, nn.Module]:
    """The blocks of those lists of layers that run, where an inferred plan named others too, or others only.

    A multimodal model has a tower for images, which texts leave out. Of a list of which a part runs nobody knows
    whether the rest would run in another step.

    Args:
        plan: inferred.
        module: the whole model.
        called: FQN of the modules that a step called.

    Returns:
        The blocks by FQN; none where no list runs as a whole, or one in part.
    """
    lists = [dict(matching(module, pattern)) for pattern in plan.blocks]
    if not any(name in called for blocks in lists for name in blocks):
        sized = [(_parameters(part), name) for name, part in module.named_modules() if _is_list_of_blocks(part)]
        plans = [ParallelPlan(blocks=_blocks_in(module, name)) for _, name in sorted(sized, reverse=True)]
        others = [other.find_blocks(module) for other in plans]
        return next((blocks for blocks in others if all(name in called for name in blocks)), {})
    running = [blocks for blocks in lists if any(name in called for name in blocks)]
    whole = all(name in called for blocks in running for name in blocks)
    return {name: block for blocks in running for name, block in blocks.items()} if whole else {}


def _largest(module: nn.Module, is_one: Callable[[nn.Module], bool]) -> tuple[str, int] | None:
    """The name of the largest part of a kind, of several the outermost, and the size of its parameters."""
    found = ((name, _parameters(part)) for name, part in module.named_modules() if is_one(part))
    return max(found, key=lambda part: (part[1], -part[0].count(".")), default=None)


def _is_list_of_blocks(module: nn.Module) -> bool:
    children = list(module.children())
    one_class = len({type(child) for child in children}) == 1
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1 and one_class


def _is_list_of_layers(module: nn.Module) -> bool:
    """Layers of several classes, as attention and recurrent layers that take turns."""
    return isinstance(module, nn.ModuleList) and len(module) > 1 and all(map(_parameters, module))


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def check_plan(plan: ParallelPlan, model: nn.Module) -> None:
    """Raises for every pattern that names no module of `model`: a typo must not train something else.

    Raises:
        ValueError: names the pattern, where the plan came from, and the nearest names that exist.
    """
    for pattern in (*plan.blocks, *plan.styles, *plan.experts, *plan.whole_batch):
        if not any(True for _ in matching(model, pattern)):
            raise ValueError(_nothing_matches(plan, model, pattern))


def _nothing_matches(plan: ParallelPlan, model: nn.Module, pattern: str) -> str:
    names = [starred(name) for name, _ in model.named_modules() if name]
    near = difflib.get_close_matches(pattern, list(dict.fromkeys(names)), n=3, cutoff=0.3)
    return (
        f"the pattern {pattern!r} of {plan.source} names no module of {type(model).__name__}; "
        f"did you mean {' or '.join(map(repr, near)) or 'one of ' + repr(names[:5])}? "
        f"A plan for this model to start from: {infer(model)!r}"
    )
