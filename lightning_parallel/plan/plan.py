"""The plan: what a model says about its own parts, as patterns over the names of its modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
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
            and compile wrap, and what a pipeline cuts. Where a plan names none, what it leaves out is found.
        styles: pattern of a weight's module -> tensor style ("colwise", "rowwise", ...).
        sequence_dim: the dimension of the batch's tensors that runs along the sequence.
        experts: patterns of the modules that hold experts.
        whole_batch: patterns of modules that compare samples with each other, as a contrastive loss or the balance of
            routers does: they get the samples of all ranks, along the first dimension of their tensors.
        batch_dims: path into the batch -> the dimension that runs over samples, where it is not the first one, or None
            for what all microbatches get, e.g. {"mask": 1, "table": None}.
        source: where the plan came from, for messages.
        inferred: whether nobody named the blocks, so that others may be taken if these do not run.

    Raises:
        ValueError: something that is no pattern, no style or no dimension.
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
        """The blocks of `model` by FQN, in the order of the patterns and of the model."""
        return {name: module for pattern in self.blocks for name, module in matching(model, pattern)}

    def require_blocks(self, model: nn.Module, asker: str) -> dict[str, nn.Module]:
        """The blocks, or an error saying who needs them and how to name them."""
        blocks = self.find_blocks(model)
        if not blocks:
            raise ValueError(
                f"{asker} acts on the repeated layers of a model, but {self.source} names none in "
                f"{type(model).__name__}; where parts run one after the other, name them, as in "
                f"plan=ParallelPlan(blocks={_parts(model)!r}); else use ZeroStrategy or "
                "DataParallelStrategy, which need no layers"
            )
        return blocks

    def over(self, other: ParallelPlan) -> ParallelPlan:
        """This plan, and for what it leaves out what the other one says."""
        default = ParallelPlan()
        left_out = [name for name in vars(self) if name != "source" and getattr(self, name) == getattr(default, name)]
        source = f"{self.source}, with the blocks of {other.source}," if other.blocks else self.source
        return replace(self, **{name: getattr(other, name) for name in left_out}, source=source)

    def __repr__(self) -> str:
        shown: dict[str, object] = {"blocks": self.blocks, "styles": dict(self.styles), "experts": self.experts}
        shown |= {"whole_batch": self.whole_batch, "batch_dims": dict(self.batch_dims)}
        return f"ParallelPlan({', '.join(f'{key}={value!r}' for key, value in shown.items() if value)})"


def _parts(model: nn.Module) -> tuple[str, ...]:
    """The outermost modules with parameters, where there are several: what a plan may start from."""
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
    """The modules of `model` on this rank whose FQN matches `pattern`, `*` standing for exactly one component."""
    expression = re.compile(r"[^.]+".join(re.escape(part) for part in pattern.split("*")))
    here = ((name, module) for name, module in model.named_modules() if ELSEWHERE not in vars(module))
    return ((name, module) for name, module in here if expression.fullmatch(name))


def starred(name: str) -> str:
    """`model.layers.3.mlp` -> `model.layers.*.mlp`: an index stands for all its siblings."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def require_plan(plan: object, source: str) -> ParallelPlan:
    """The plan, or an error that says who gave something else."""
    if not isinstance(plan, ParallelPlan):
        raise TypeError(f"{source} gives {plan!r}, which is no plan; give ParallelPlan(blocks='net.layers.*')")
    return plan
