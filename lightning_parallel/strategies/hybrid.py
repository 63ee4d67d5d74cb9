"""Any set of techniques at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from lightning_parallel.plan import ParallelPlan
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from lightning_parallel.techniques.technique import Technique


@final
class HybridStrategy(MeshStrategy):
    """Trains with the techniques given, in any order: `HybridStrategy(Zero(4), ActivationCheckpoint())`.

    Args:
        given: how training is divided; `HybridStrategy()` trains on a single device.
        techniques: the same as a list, for files and commands in which every argument has a name.
        plan: what the model's parts are; found by itself where it is not given.
        lightning: Lightning's own arguments, see `MeshStrategy`.

    Raises:
        TypeError: something that is no technique.
        ValueError: techniques in both forms, two that claim one axis, or sizes that do not fit.
    """

    def __init__(
        self,
        *given: Technique,
        techniques: Sequence[Technique] | None = None,
        plan: ParallelPlan | None = None,
        **lightning: Any,
    ) -> None:
        if given and techniques is not None:
            raise ValueError(
                f"{', '.join(map(repr, given))} and techniques={techniques!r} are both given; "
                "put all of them into the list, or all before it"
            )
        if isinstance(techniques, Technique):
            raise TypeError(f"techniques={techniques!r} is no list; write techniques=[{techniques!r}]")
        chosen = given if techniques is None else techniques
        for technique in chosen:
            if not isinstance(technique, Technique):
                raise TypeError(f"{technique!r} is no technique; pass objects such as Zero(4) or DataParallel()")
        super().__init__(chosen, plan, **lightning)
