"""The plan: what a model says about its own parts, as patterns over the names of its modules."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

ELSEWHERE = "_lightning_parallel_elsewhere"
"""The mark of modules that another rank runs: this rank's techniques have nothing to do with them."""


@dataclass(frozen=True)
class ParallelPlan:
    """Names the parts of a model on which techniques act.

    A pattern is a fully qualified name (FQN) in which `*` stands for exactly one component: "model.layers.*".

    Args:
        blocks: patterns of the repeated layers, in the order in which they run: what ZeRO, activation checkpointing
            and compile wrap, and what a pipeline cuts.
        styles: pattern of a weight's module -> tensor style ("colwise", "rowwise", ...).
        sequence_dim: the dimension of the batch's tensors that runs along the sequence.
        positions: the name of the batch's (or the model's) position input, None if the model makes its own.
        experts: patterns of the modules that hold experts.
        source: where the plan came from, for messages.

    Raises:
        ValueError: something that is no pattern, no style or no dimension.
    """

    blocks: tuple[str, ...] | str = ()
    styles: Mapping[str, str] = field(default_factory=dict)
    sequence_dim: int = 1
    positions: str | None = None
    experts: tuple[str, ...] | str = ()
    source: str = "the plan given"

    def __post_init__(self) -> None:
        for name in ("blocks", "experts"):
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))
        if not isinstance(self.styles, Mapping) or not all(isinstance(s, str) for s in self.styles.values()):
            raise ValueError(
                f"ParallelPlan(styles={self.styles!r}): styles maps patterns to names of styles, as in "
                "{'net.layers.*.up': 'colwise', 'net.layers.*.down': 'rowwise'}"
            )
        _patterns("styles", list(self.styles))
        if type(self.sequence_dim) is not int or self.sequence_dim < 0:
            raise ValueError(
                f"ParallelPlan(sequence_dim={self.sequence_dim!r}): sequence_dim is a dimension, counted from 0"
            )

    def check(self, model: nn.Module) -> None:
        """Raises for every pattern that names no module of `model`: a typo must not train something else.

        Raises:
            ValueError: names the pattern, where the plan came from, and the nearest names that exist.
        """
        for pattern in (*self.blocks, *self.styles, *self.experts):
            if not any(True for _ in matching(model, pattern)):
                raise ValueError(self._nothing_matches(model, pattern))

    def _nothing_matches(self, model: nn.Module, pattern: str) -> str:
        names = [starred(name) for name, _ in model.named_modules() if name]
        near = difflib.get_close_matches(pattern, list(dict.fromkeys(names)), n=3, cutoff=0.3)
        return (
            f"the pattern {pattern!r} of {self.source} names no module of {type(model).__name__}; "
            f"did you mean {' or '.join(map(repr, near)) or 'one of ' + repr(names[:5])}? "
            f"A plan for this model to start from: {infer(model)!r}"
        )

    def find_blocks(self, model: nn.Module) -> dict[str, nn.Module]:
        """The blocks of `model` by FQN, in the order of the patterns and of the model."""
        return {name: module for pattern in self.blocks for name, module in matching(model, pattern)}

    def require_blocks(self, model: nn.Module, asker: str) -> dict[str, nn.Module]:
        """The blocks, or an error saying who needs them and how to name them."""
        blocks = self.find_blocks(model)
        if not blocks:
            raise ValueError(
                f"{asker} acts on the repeated layers of a model, but {self.source} names none in "
                f"{type(model).__name__}; "
                "pass plan=ParallelPlan(blocks='net.layers.*') with the name of your list of layers"
            )
        return blocks

    def __repr__(self) -> str:
        shown = {"blocks": self.blocks, "styles": dict(self.styles), "experts": self.experts}
        return f"ParallelPlan({', '.join(f'{key}={value!r}' for key, value in shown.items() if value)})"


def _patterns(name: str, value: object) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(
            f"ParallelPlan({name}={value!r}): {name} are names of modules in which '*' stands for one component, as in "
            "'net.layers.*'"
        )
    return patterns


def matching(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules of `model` on this rank whose FQN matches `pattern`, `*` standing for exactly one component."""
    expression = re.compile(r"[^.]+".join(re.escape(part) for part in pattern.split("*")))
    here = ((name, module) for name, module in model.named_modules() if ELSEWHERE not in vars(module))
    return ((name, module) for name, module in here if expression.fullmatch(name))


def find_plan(module: nn.Module, given: ParallelPlan | None = None) -> ParallelPlan:
    """Finds the plan of a model: the one given, its own `parallel_plan()`, its Hugging Face metadata, or its structure.

    Args:
        module: the whole model, before any technique touched it.
        given: the strategy's `plan=` argument.
    """
    if given is not None:
        return given
    own = getattr(module, "parallel_plan", None)
    if callable(own):
        source = f"{type(module).__name__}.parallel_plan()"
        return replace(require_plan(own(), source), source=source)
    return from_metadata(module) or infer(module)


def require_plan(plan: object, source: str) -> ParallelPlan:
    """The plan, or an error that says who gave something else."""
    if not isinstance(plan, ParallelPlan):
        raise TypeError(f"{source} gives {plan!r}, which is no plan; give ParallelPlan(blocks='net.layers.*')")
    return plan


def from_metadata(module: nn.Module) -> ParallelPlan | None:
    """The plan that a Hugging Face model's own metadata gives (`_no_split_modules`), None where there is none."""
    for name, part in module.named_modules():
        classes = getattr(part, "_no_split_modules", None)
        if not isinstance(classes, (list, tuple, set)):
            continue
        found = _outermost([child for child, block in part.named_modules() if type(block).__name__ in classes])
        patterns = tuple(dict.fromkeys(starred(f"{name}.{child}" if name else child) for child in found))
        if patterns:
            return ParallelPlan(
                blocks=patterns, positions="position_ids", source=f"the metadata of {type(part).__name__}"
            )
    return None


def _outermost(names: list[str]) -> list[str]:
    """Those that lie in no other one; parents come before their children."""
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
        return ParallelPlan(source=source)
    blocks = f"{largest[0]}.*" if largest[0] else "*"
    while any(isinstance(block, (nn.ModuleList, nn.ModuleDict)) for _, block in matching(module, blocks)):
        blocks += ".*"  # a list of layers, each a list of parts: those are what is called
    return ParallelPlan(blocks=(blocks,), source=source)


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


def starred(name: str) -> str:
    """`model.layers.3.mlp` -> `model.layers.*.mlp`: an index stands for all its siblings."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
