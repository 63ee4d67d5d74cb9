"""Any set of techniques at once."""

from __future__ import annotations

from typing import Any, final

from lightning_parallel.plan import ParallelPlan
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from lightning_parallel.techniques.technique import Technique


@final
class HybridStrategy(MeshStrategy):
    """Trains with the techniques given, in any order: `HybridStrategy(Zero(4), ActivationCheckpoint())`.

    Args:
        techniques: how training is divided; `HybridStrategy()` trains on a single device.
        plan: what the model's parts are; found by itself where it is not given.
        lightning: Lightning's own arguments, see `MeshStrategy`.

    Raises:
        TypeError: something that is no technique.
        ValueError: two techniques that claim one axis, or sizes that do not fit.
    """

    def __init__(self, *techniques: Technique, plan: ParallelPlan | None = None, **lightning: Any) -> None:
        for technique in techniques:
            if not isinstance(technique, Technique):
                raise TypeError(f"{technique!r} is no technique; pass objects such as Zero(4) or DataParallel()")
        super().__init__(techniques, plan, **lightning)
