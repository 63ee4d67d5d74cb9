"""Find the plan of a model: given by its `parallel_plan()`, by a Hugging Face model's metadata, or by its structure.

Hugging Face models describe their parts in attributes of the model and of its configuration.
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
    """Return the given plan, or the plan of the model's `parallel_plan()`, its Hugging Face metadata, or its structure.

    A plan that names no blocks is completed by the plan that would be found without it.

    Args:
        module: the full model, before any technique changed it.
        given: the strategy's `plan=` argument.
    """
    parallel_plan = getattr(module, "parallel_plan", None)
    if given is not None:
        return given if given.blocks else given.over(find_plan(module))
    inferred = plan_from_metadata(module) or infer(module)
    if not callable(parallel_plan):
        return inferred
    source = f"{type(module).__name__}.parallel_plan()"
    plan = replace(require_plan(parallel_plan(), source), source=source, inferred=False)
    return plan if plan.blocks else plan.over(inferred)


def infer(module: nn.Module) -> ParallelPlan:
    """Return the plan suggested by a model's structure: its blocks are the layers of the largest list."""
    lists = _lists_of_layers(module)
    blocks = _blocks_in(module, lists[0]) if lists else ()
    return ParallelPlan(blocks=blocks, source=f"the structure of {type(module).__name__}", inferred=True)


def _lists_of_layers(module: nn.Module) -> list[str]:
    """Return the names of the lists of layers, the largest first, by number of parameters.

    Lists of one class count twice. A ModuleList may also have layers of several classes, such as alternating attention
    and recurrent layers.
    """
    sized: list[tuple[int, int, str]] = []
    for name, layers in module.named_modules():
        if not isinstance(layers, (nn.ModuleList, nn.Sequential)) or len(layers) < 2:
            continue
        sizes = [sum(parameter.numel() for parameter in child.parameters()) for child in layers.children()]
        one_class = len({type(child) for child in layers.children()}) == 1
        if one_class or (isinstance(layers, nn.ModuleList) and all(sizes)):
            sized.append((-sum(sizes) * (2 if one_class else 1), name.count("."), name))
    return [name for *_, name in sorted(sized, key=itemgetter(0, 1))]


def _blocks_in(module: nn.Module, layers: str) -> tuple[str, ...]:
    """Return the pattern of the blocks in a list of layers, or their names if an earlier list also has some of them."""
    blocks = f"{layers}.*" if layers else "*"
    first = {part: name for name, part in module.named_modules()}
    names = tuple(first[part] for part in module.get_submodule(layers).children())
    if not {*names} <= {name for name, _ in matching(module, blocks)}:
        return names
    while any(isinstance(block, (nn.ModuleList, nn.ModuleDict)) for _, block in matching(module, blocks)):
        blocks += ".*"  # a list of layers, each a list of parts: the parts are what is called
    return (blocks,)


def running_blocks(plan: ParallelPlan, module: nn.Module, called: Collection[str]) -> dict[str, nn.Module]:
    """Return the blocks of the lists that a step runs, for an inferred plan of which it did not run all blocks.

    E.g. a multimodal model has an image tower, which text batches skip. If only a part of a list runs, the rest of it
    may run in another step, so there is no answer.

    Args:
        plan: an inferred plan.
        module: the full model.
        called: FQNs of the modules that a step called.

    Returns:
        The blocks by FQN; empty if no list runs in full, or some list runs in part.
    """
    named = [dict(matching(module, pattern)) for pattern in plan.blocks]
    running = [blocks for blocks in named if any(name in called for name in blocks)]
    if not running:
        others = [
            ParallelPlan(blocks=_blocks_in(module, name)).find_blocks(module) for name in _lists_of_layers(module)
        ]
        running = [blocks for blocks in others if all(name in called for name in blocks)][:1]
    blocks = {name: block for layers in running for name, block in layers.items()}
    return blocks if all(name in called for name in blocks) else {}


def check_plan(plan: ParallelPlan, model: nn.Module) -> None:
    """Raise for every pattern that names no module of `model`: a typo must not change what is trained.

    Raises:
        ValueError: names the pattern, the source of the plan, and the most similar names of modules.
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
    """Yield each "tp", "ep" or "fsdp" plan in a model: the name of the module that has it, the module, and the plan."""
    for name, part in model.named_modules():
        for owner, attribute in ((part, f"_{kind}_plan"), (getattr(part, "config", None), f"base_model_{kind}_plan")):
            plan = getattr(owner, attribute, None)
            if isinstance(plan, Mapping) and plan:
                yield name, part, plan


def plan_from_metadata(model: nn.Module) -> ParallelPlan | None:
    """Return the plan with the outermost blocks of the first submodule that names any; None if none does.

    Blocks are the instances of `_no_split_modules`, or match the patterns of an `fsdp_plan` with a star: "layers.*".
    """
    for name, part in model.named_modules():
        classes = getattr(part, "_no_split_modules", None)
        if isinstance(classes, (list, tuple, set)):
            outer: list[str] = []  # blocks inside no other block; parents come before their children
            for child, block in part.named_modules():
                if type(block).__name__ in classes and not any(child.startswith(f"{parent}.") for parent in outer):
                    outer.append(child)
            if result := tuple(dict.fromkeys(starred(within(name, child)) for child in outer)):
                return ParallelPlan(blocks=result, source=f"the metadata of {type(part).__name__}", inferred=True)
    for name, part, plan in plans(model, "fsdp"):
        patterns = [within(name, pattern) for pattern in plan if isinstance(pattern, str) and "*" in pattern]
        if result := tuple(pattern for pattern in patterns if any(True for _ in matching(model, pattern))):
            return ParallelPlan(blocks=result, source=f"the metadata of {type(part).__name__}", inferred=True)
    return None


def within(prefix: str, name: str) -> str:
    """Return the FQN of a submodule `name` of the submodule `prefix`."""
    return f"{prefix}.{name}" if prefix and name else prefix or name
