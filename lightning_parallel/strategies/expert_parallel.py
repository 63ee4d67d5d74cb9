"""Expert parallel as a strategy."""

from __future__ import annotations

from typing import Any, final

from lightning_parallel.mesh import Size
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from lightning_parallel.techniques.data_parallel import DataParallel
from lightning_parallel.techniques.expert_parallel import ExpertParallel


@final
class ExpertParallelStrategy(MeshStrategy):
    """Data parallel on all ranks, with the experts divided over them; see `ExpertParallel` for the arguments."""

    def __init__(
        self,
        size: Size = "auto",
        *,
        capacity_factor: float | None = None,
        send_once: bool = True,
        plan: ParallelPlan | None = None,
        **lightning: Any,
    ) -> None:
        technique = ExpertParallel(size, capacity_factor=capacity_factor, send_once=send_once)
        super().__init__([DataParallel(), technique], plan, **lightning)
