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
        plan: ParallelPlan | None = None,
        **lightning: Any,
    ) -> None:
        super().__init__([DataParallel(), ExpertParallel(size)], plan, **lightning)
