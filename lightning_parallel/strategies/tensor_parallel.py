"""Tensor parallel as a strategy."""

from __future__ import annotations

from typing import Any, final

from lightning_parallel.mesh import Size
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from lightning_parallel.techniques.tensor_parallel import TensorParallel


@final
class TensorParallelStrategy(MeshStrategy):
    """Ranks hold features of each layer and read the same samples; see `TensorParallel` for the arguments."""

    def __init__(
        self,
        size: Size = "auto",
        *,
        sequence_parallel: bool = True,
        regather: bool = False,
        overlap: bool = False,
        plan: ParallelPlan | None = None,
        **lightning: Any,
    ) -> None:
        technique = TensorParallel(size, sequence_parallel=sequence_parallel, regather=regather, overlap=overlap)
        super().__init__([technique], plan, **lightning)
