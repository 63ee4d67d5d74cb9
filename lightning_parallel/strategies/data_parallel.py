"""Data parallel as a strategy."""

from __future__ import annotations

from typing import Any, final

from lightning_parallel.mesh import Size
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from lightning_parallel.techniques.data_parallel import DataParallel
from lightning_parallel.techniques.gradients.average import Compression


@final
class DataParallelStrategy(MeshStrategy):
    """Every rank holds the whole model and sees other samples; see `DataParallel` for the arguments."""

    def __init__(
        self, size: Size = "auto", *, compression: Compression | None = None, bucket_mb: float = 25, **lightning: Any
    ) -> None:
        super().__init__([DataParallel(size, compression=compression, bucket_mb=bucket_mb)], **lightning)
