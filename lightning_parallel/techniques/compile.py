"""Compilation of each block with `torch.compile`: blocks of one class share one graph, which is compiled once.

Source: J. Ansel et al., PyTorch 2, ASPLOS 2024; per block as torchtitan does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from lightning_parallel.arguments import one_of, true_or_false
from lightning_parallel.techniques.divided.in_graph import CompiledForward, Graphs
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.tools.redirect import Forward, Redirected, redirect_forward


@dataclass(frozen=True)
class Compile(Technique):
    """Compiles the forward and backward of the plan's blocks.

    Args:
        backend: the backend of `torch.compile`; "inductor" needs a C++ compiler on the CPU.
        fullgraph: raise at a graph break instead of splitting the graph.
        dynamic: whether to compile for changing shapes; None: as in `torch.compile`, once a shape has changed.
        mode: an inductor mode such as "max-autotune".

    Raises:
        ValueError: an unknown backend, a mode that it does not have, or (when training starts) a model without blocks.
    """

    backend: str = "inductor"
    fullgraph: bool = False
    dynamic: bool | None = None
    mode: str | None = None

    phase: ClassVar[Phase] = Phase.COMPILE

    def __post_init__(self) -> None:
        known = torch.compiler.list_backends(exclude_tags=())
        if self.backend not in known:
            raise ValueError(f"Compile(backend={self.backend!r}): available backends: {', '.join(sorted(known))}")
        true_or_false("Compile", fullgraph=self.fullgraph)
        one_of("Compile", "dynamic", self.dynamic, (None, True, False))
        if self.mode is not None and self.backend != "inductor":
            raise ValueError(f"Compile({self.backend!r}, mode={self.mode!r}): only inductor has modes; omit mode")
        if self.mode is not None:
            one_of("Compile", "mode", self.mode, (None, *torch._inductor.list_mode_options()))

    @property
    def traits(self) -> Traits:
        """See `Technique.traits`."""
        return Traits(why_backward_is_joint="computes both in one compiled backward")

    def divide(self, model: nn.Module, context: PartitionContext, analysis: None) -> Division:
        """Replace the forward of every block by its compiled version."""
        graphs = Graphs(self._compile, context.mesh)
        for block in context.plan.require_blocks(model, repr(self)).values():
            redirect_forward(block, CompiledForward, block, graphs=graphs, must_compile=self.fullgraph)
        return Division(model)

    def _compile(self, forward: Forward, guard_filter: GuardFilter | None = None, **further: Any) -> Forward:
        mode_options = torch._inductor.list_mode_options(self.mode, self.dynamic) if self.mode else {}
        # torch.compile takes a mode or options
        options = {"guard_filter_fn": guard_filter or _filter_guards, **mode_options}
        arguments = {"backend": self.backend, "fullgraph": self.fullgraph, "dynamic": self.dynamic, "options": options}
        return torch.compile(forward, **{**arguments, **further})


IDENTITY_GUARDS = ("CLOSURE_MATCH", "FUNCTION_MATCH", "ID_MATCH")
"""Types of guards on the identity of an object."""
GuardFilter = Callable[[Sequence[Any]], list[bool]]
"""A `guard_filter_fn` of `torch.compile`: for each guard that Dynamo found, whether the graph keeps it."""


def _filter_guards(guards: Sequence[Any]) -> list[bool]:
    """Return for each guard whether the graph keeps it: all but those on this project's modules and on redirections.

    The globals of this project stay the same while a program runs; hundreds of guards on tables of rules would be
    checked at every call of every block. A guard on the identity of a redirected forward would tie the graph to one
    block; the function that it calls has guards itself.
    """
    return [
        "G['__import_lightning_parallel_" not in guard.name
        and not (guard.guard_type in IDENTITY_GUARDS and isinstance(guard.value, Redirected))
        for guard in guards
    ]
