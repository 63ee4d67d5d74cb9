"""Pipeline parallel as a strategy."""

from __future__ import annotations

from typing import Any, Literal, final

from lightning_parallel.mesh import Size
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from lightning_parallel.techniques.pipeline_parallel.technique import LossOver, PipelineParallel


@final
class PipelineParallelStrategy(MeshStrategy):
    """Layers on different ranks, microbatches on their way through them; see `PipelineParallel` for the arguments."""

    def __init__(
        self,
        size: Size = "auto",
        *,
        schedule: str = "1f1b",
        microbatches: int | Literal["auto"] = "auto",
        stages_per_rank: int | None = None,
        split: tuple[int, ...] | None = None,
        loss_over: LossOver = "auto",
        **lightning: Any,
    ) -> None:
        pipeline = PipelineParallel(
            size,
            schedule=schedule,
            microbatches=microbatches,
            stages_per_rank=stages_per_rank,
            split=split,
            loss_over=loss_over,
        )
        super().__init__([pipeline], **lightning)
