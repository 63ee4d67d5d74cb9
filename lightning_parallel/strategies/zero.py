"""ZeRO as a strategy."""

from __future__ import annotations

from typing import Any, Literal, final

from lightning_parallel.mesh import Size
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from lightning_parallel.techniques.zero import Zero


@final
class ZeroStrategy(MeshStrategy):
    """Ranks share states (stage 1), gradients (2) and parameters (3); see `Zero` for the arguments."""

    def __init__(
        self,
        size: Size = "auto",
        *,
        stage: Literal[1, 2, 3] = 3,
        replicate: Size = 1,
        offload: bool = False,
        **lightning: Any,
    ) -> None:
        super().__init__([Zero(size, stage=stage, replicate=replicate, offload=offload)], **lightning)
