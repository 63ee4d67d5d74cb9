"""Compilation of each block with `torch.compile`: one graph, compiled once, for all blocks of a kind.

Source: J. Ansel et al., PyTorch 2, ASPLOS 2024; per block as torchtitan does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from lightning_parallel.arguments import one_of, true_or_false
from lightning_parallel.mesh import Axis, Size
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
        dynamic: whether to compile for changing shapes; None finds out.
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
            raise ValueError(f"Compile(backend={self.backend!r}): the backends here are {', '.join(sorted(known))}")
        true_or_false("Compile", fullgraph=self.fullgraph)
        one_of("Compile", "dynamic", self.dynamic, (None, True, False))
        if self.mode is not None and self.backend != "inductor":
            raise ValueError(f"Compile({self.backend!r}, mode={self.mode!r}): modes are inductor's; leave mode out")
        if self.mode is not None:
            one_of("Compile", "mode", self.mode, (None, *torch._inductor.list_mode_options()))

    @property
    def traits(self) -> Traits:
        """See `Technique.traits`."""
        return Traits(keeps_backward_whole="computes both in one compiled backward")

    @property
    def axes(self) -> Mapping[Axis, Size]:
        """See `Technique.axes`: none."""
        return {}

    def divide(self, model: nn.Module, ground: PartitionContext, seen: None) -> Division:
        """Leads the forward of every block through its compiled form."""
        graphs = Graphs(self._compile, ground.mesh)
        for block in ground.plan.require_blocks(model, repr(self)).values():
            redirect_forward(block, CompiledForward, block, graphs=graphs, must_compile=self.fullgraph)
        return Division(model)

    def _compile(self, forward: Forward, asks_for: Conditions | None = None, **further: Any) -> Forward:
        of_mode = torch._inductor.list_mode_options(self.mode, self.dynamic) if self.mode else {}
        options = {"guard_filter_fn": asks_for or _may_change, **of_mode}  # torch.compile takes a mode or options
        arguments = {"backend": self.backend, "fullgraph": self.fullgraph, "dynamic": self.dynamic, "options": options}
        return torch.compile(forward, **{**arguments, **further})


OF_ITSELF = ("CLOSURE_MATCH", "FUNCTION_MATCH", "ID_MATCH")
"""Conditions that a thing is the very same."""
Conditions = Callable[[Sequence[Any]], list[bool]]
"""Which of the conditions that a compiler found a graph keeps."""


def _may_change(guards: Sequence[Any]) -> list[bool]:
    """Which conditions a graph keeps: what modules of this project hold stays the same while a program runs.

    They are hundreds, on tables of rules, and would be asked at every call of every block. Nor need a redirected
    forward be the very same, which would make a graph one block's alone: what it leads to has conditions of its own.
    """
    return [
        "G['__import_lightning_parallel_" not in guard.name
        and not (guard.guard_type in OF_ITSELF and isinstance(guard.value, Redirected))
        for guard in guards
    ]
