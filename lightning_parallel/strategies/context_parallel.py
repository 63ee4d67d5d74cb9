"""Context parallel as a strategy."""

from __future__ import annotations

from typing import Any, final

from lightning_parallel.mesh import Size
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from lightning_parallel.techniques.context_parallel import ContextParallel
from lightning_parallel.techniques.context_parallel.technique import Method


@final
class ContextParallelStrategy(MeshStrategy):
    """Ranks hold positions of each sequence and read the same samples; see `ContextParallel` for the arguments."""

    def __init__(
        self,
        size: Size = "auto",
        *,
        method: Method = "auto",
        load_balance: bool = True,
        plan: ParallelPlan | None = None,
        **lightning: Any,
    ) -> None:
        technique = ContextParallel(size, method=method, load_balance=load_balance)
        super().__init__([technique], plan, **lightning)
