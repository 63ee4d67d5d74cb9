"""Layer parallel as a strategy: naive model parallelism."""

from __future__ import annotations

from typing import Any, final

from lightning_parallel.mesh import Size
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from lightning_parallel.techniques.pipeline_parallel.technique import PipelineParallel


@final
class LayerParallelStrategy(MeshStrategy):
    """Layers on different ranks, which run in turn: a pipeline of one microbatch."""

    def __init__(self, size: Size = "auto", *, split: tuple[int, ...] | None = None, **lightning: Any) -> None:
        super().__init__([PipelineParallel(size, schedule="gpipe", microbatches=1, split=split)], **lightning)
