"""The plan: which modules of a model the techniques act on, as patterns of module names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

ELSEWHERE = "_lightning_parallel_elsewhere"
"""Attribute that marks modules on other pipeline stages: techniques of this rank skip them."""


@dataclass(frozen=True)
class ParallelPlan:
    """Names of the parts of a model on which techniques act.

    A pattern is a fully qualified name (FQN) in which `*` stands for exactly one component: "model.layers.*".

    Args:
        blocks: patterns of the repeated layers, in execution order. ZeRO, activation checkpointing and compile wrap
            each block, and a pipeline cuts between blocks. If a plan names none, they are found in the model.
        styles: pattern of a weight's module -> tensor-parallel style ("colwise", "rowwise", ...).
        sequence_dim: sequence dimension of the batch's tensors.
        experts: patterns of the modules that hold experts.
        whole_batch: patterns of modules that compare samples with each other, such as a contrastive loss or a router's
            load-balancing loss: they get the samples of all ranks, along the first dimension of their tensors.
        batch_dims: path into the batch -> the dimension of samples where it is not the first one, or None for a value
            that every microbatch gets, e.g. {"mask": 1, "table": None}.
        source: where the plan came from, for messages.
        inferred: whether the blocks are a guess, which may be replaced by others if these do not run.

    Raises:
        ValueError: an invalid pattern, style or dimension.
    """

    blocks: tuple[str, ...] | str = ()
    styles: Mapping[str, str] = field(default_factory=dict)
    sequence_dim: int = 1
    experts: tuple[str, ...] | str = ()
    whole_batch: tuple[str, ...] | str = ()
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    source: str = "the plan given"
    inferred: bool = False

    def __post_init__(self) -> None:
        for name in ("blocks", "experts", "whole_batch"):
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
        if not isinstance(self.batch_dims, Mapping) or not all(
            isinstance(path, str) and (dim is None or (type(dim) is int and dim >= 0))
            for path, dim in self.batch_dims.items()
        ):
            raise ValueError(
                f"ParallelPlan(batch_dims={self.batch_dims!r}): batch_dims maps paths into the batch to the dimension "
                "of samples, or None, as in {'mask': 1, 'table': None}"
            )

    def find_blocks(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the blocks of `model` by FQN, in the order of the patterns and of the model."""
        return {name: module for pattern in self.blocks for name, module in matching(model, pattern)}

    def require_blocks(self, model: nn.Module, asker: str) -> dict[str, nn.Module]:
        """Return the blocks; if there are none, raise ValueError with who needs them (`asker`) and how to name them."""
        blocks = self.find_blocks(model)
        if not blocks:
            raise ValueError(
                f"{asker} acts on the repeated layers of a model, but {self.source} names none in "
                f"{type(model).__name__}. If its parts run one after the other, name them, as in "
                f"plan=ParallelPlan(blocks={_parts(model)!r}); else use ZeroStrategy or "
                "DataParallelStrategy, which need no layers"
            )
        return blocks

    def over(self, other: ParallelPlan) -> ParallelPlan:
        """Return this plan, with the fields of `other` for those that this plan leaves out."""
        default = ParallelPlan()
        omitted = [name for name in vars(self) if name != "source" and getattr(self, name) == getattr(default, name)]
        source = f"{self.source}, with the blocks of {other.source}," if other.blocks else self.source
        return replace(self, **{name: getattr(other, name) for name in omitted}, source=source)

    def __repr__(self) -> str:
        fields: dict[str, object] = {"blocks": self.blocks, "styles": dict(self.styles), "experts": self.experts}
        fields |= {"whole_batch": self.whole_batch, "batch_dims": dict(self.batch_dims)}
        return f"ParallelPlan({', '.join(f'{key}={value!r}' for key, value in fields.items() if value)})"


def _parts(model: nn.Module) -> tuple[str, ...]:
    """Return the outermost modules with parameters, where there are several: an example of blocks for an error."""
    prefix, names = "", [""]
    while len(names) == 1:
        prefix = f"{prefix}{names[0]}." if names[0] else prefix
        part = model.get_submodule(prefix.rstrip("."))
        names = [name for name, child in part.named_children() if any(True for _ in child.parameters())]
    return tuple(f"{prefix}{name}" for name in names) or ("net.layers.*",)


def _patterns(name: str, value: object) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(
            f"ParallelPlan({name}={value!r}): {name} are names of modules in which '*' stands for one component, as in "
            "'net.layers.*'"
        )
    return patterns


def matching(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of `model` on this rank whose FQN matches `pattern`; `*` stands for exactly one component."""
    expression = re.compile(r"[^.]+".join(re.escape(part) for part in pattern.split("*")))
    local_modules = ((name, module) for name, module in model.named_modules() if ELSEWHERE not in vars(module))
    return ((name, module) for name, module in local_modules if expression.fullmatch(name))


def starred(name: str) -> str:
    """Replace each index by a star, which matches all its siblings: `model.layers.3.mlp` -> `model.layers.*.mlp`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def require_plan(plan: object, source: str) -> ParallelPlan:
    """Return `plan`; raise TypeError with its `source` if it is no ParallelPlan."""
    if not isinstance(plan, ParallelPlan):
        raise TypeError(f"{source} gives {plan!r}, which is not a plan; give ParallelPlan(blocks='net.layers.*')")
    return plan
