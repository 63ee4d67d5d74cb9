"""Find the plan of a model: its own word, a Hugging Face model's metadata, or its structure.

Hugging Face models say about their parts in attributes of the model and of its configuration.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any

from torch import nn

from lightning_parallel.plan.plan import ParallelPlan, matching, require_plan, starred


def find_plan(module: nn.Module, given: ParallelPlan | None = None) -> ParallelPlan:
    """Return the plan given, or of the model's `parallel_plan()`, its Hugging Face metadata, or its structure.

    One that names no blocks adds to what would be found without it.

    Args:
        module: the full model, before any technique touched it.
        given: the strategy's `plan=` argument.
    """
    own = getattr(module, "parallel_plan", None)
    if given is not None:
        return given if given.blocks else given.over(find_plan(module))
    patterns, model = blocks_of(module)
    guessed = infer(module)
    if patterns:
        guessed = ParallelPlan(blocks=patterns, source=f"the metadata of {model}", inferred=True)
    if not callable(own):
        return guessed
    source = f"{type(module).__name__}.parallel_plan()"
    plan = replace(require_plan(own(), source), source=source, inferred=False)
    return plan if plan.blocks else plan.over(guessed)


def infer(module: nn.Module) -> ParallelPlan:
    """Return the plan that a model's structure suggests: its blocks are the largest list of layers."""
    lists = _lists_of_layers(module)
    blocks = _blocks_in(module, lists[0]) if lists else ()
    return ParallelPlan(blocks=blocks, source=f"the structure of {type(module).__name__}", inferred=True)


def _lists_of_layers(module: nn.Module) -> list[str]:
    """Return the names of lists of layers, the largest first.

    Layers of one class count twice; a ModuleList may also have layers of several classes, as attention and recurrent
    layers that take turns.
    """
    sized: list[tuple[int, int, str]] = []
    for name, part in module.named_modules():
        if not isinstance(part, (nn.ModuleList, nn.Sequential)) or len(part) < 2:
            continue
        sizes = [sum(parameter.numel() for parameter in child.parameters()) for child in part.children()]
        one_class = len({type(child) for child in part.children()}) == 1
        if one_class or (isinstance(part, nn.ModuleList) and all(sizes)):
            sized.append((-sum(sizes) * (2 if one_class else 1), name.count("."), name))
    return [name for *_, name in sorted(sized, key=itemgetter(0, 1))]


def _blocks_in(module: nn.Module, layers: str) -> tuple[str, ...]:
    """Return the pattern of the blocks in a list of layers, or their names where a list before it has some of them."""
    blocks = f"{layers}.*" if layers else "*"
    first = {part: name for name, part in module.named_modules()}
    names = tuple(first[part] for part in module.get_submodule(layers).children())
    if not {*names} <= {name for name, _ in matching(module, blocks)}:
        return names
    while any(isinstance(block, (nn.ModuleList, nn.ModuleDict)) for _, block in matching(module, blocks)):
        blocks += ".*"  # a list of layers, each a list of parts: those are what is called
    return (blocks,)


def running_blocks(plan: ParallelPlan, module: nn.Module, called: Collection[str]) -> dict[str, nn.Module]:
    """Return the blocks of those lists that a step runs, where an inferred plan named more, or others.

    A multimodal model has a tower for images, which texts leave out. Of a list of which a part runs nobody knows
    whether the rest would run in another step.

    Args:
        plan: inferred.
        module: the full model.
        called: FQN of the modules that a step called.

    Returns:
        The blocks by FQN; none where no list runs as a whole, or one in part.
    """
    named = [dict(matching(module, pattern)) for pattern in plan.blocks]
    running = [blocks for blocks in named if any(name in called for name in blocks)]
    if not running:
        others = [
            ParallelPlan(blocks=_blocks_in(module, name)).find_blocks(module) for name in _lists_of_layers(module)
        ]
        running = [blocks for blocks in others if all(name in called for name in blocks)][:1]
    blocks = {name: block for each in running for name, block in each.items()}
    return blocks if all(name in called for name in blocks) else {}


def check_plan(plan: ParallelPlan, model: nn.Module) -> None:
    """Raise for every pattern that names no module of `model`: a typo must not train something else.

    Raises:
        ValueError: names the pattern, where the plan came from, and the nearest names that exist.
    """
    for pattern in (*plan.blocks, *plan.styles, *plan.experts, *plan.whole_batch):
        if any(True for _ in matching(model, pattern)):
            continue
        names = [starred(name) for name, _ in model.named_modules() if name]
        near = difflib.get_close_matches(pattern, list(dict.fromkeys(names)), n=3, cutoff=0.3)
        raise ValueError(
            f"the pattern {pattern!r} of {plan.source} names no module of {type(model).__name__}; "
            f"did you mean {' or '.join(map(repr, near)) or 'one of ' + repr(names[:5])}? "
            f"A plan for this model to start from: {infer(model)!r}"
        )


# ---------------------------------------------------------------- Hugging Face's metadata


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
            outer: list[str] = []  # blocks that lie in no other one; parents come before their children
            for child, block in part.named_modules():
                if type(block).__name__ in classes and not any(child.startswith(f"{each}.") for each in outer):
                    outer.append(child)
            if found := tuple(dict.fromkeys(starred(within(name, child)) for child in outer)):
                return found, type(part).__name__
    for name, part, plan in plans(model, "fsdp"):
        patterns = [within(name, pattern) for pattern in plan if isinstance(pattern, str) and "*" in pattern]
        if found := tuple(pattern for pattern in patterns if any(True for _ in matching(model, pattern))):
            return found, type(part).__name__
    return (), ""


def within(prefix: str, name: str) -> str:
    """Return the name in the full model of a part of a part."""
    return f"{prefix}.{name}" if prefix and name else prefix or name
