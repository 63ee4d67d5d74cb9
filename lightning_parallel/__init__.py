"""Strategies with which an unchanged LightningModule trains under any kind of parallelism.

Importing the package registers its strategies with Lightning, so that `Trainer(strategy="lp_zero3")` works.
"""

from typing import Any

from lightning_parallel.mesh import AXES, ParallelMesh
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.strategies.lightning_package import StrategyRegistry, refuse_in_other
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from lightning_parallel.strategies.named import (
    ContextParallelStrategy,
    DataParallelStrategy,
    ExpertParallelStrategy,
    HybridStrategy,
    LayerParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeroStrategy,
)
from lightning_parallel.techniques.activation_checkpoint import ActivationCheckpoint
from lightning_parallel.techniques.compile import Compile
from lightning_parallel.techniques.context_parallel import ContextParallel
from lightning_parallel.techniques.data_parallel import DataParallel
from lightning_parallel.techniques.expert_parallel import ExpertParallel
from lightning_parallel.techniques.pipeline_parallel.technique import PipelineParallel
from lightning_parallel.techniques.tensor_parallel import TensorParallel
from lightning_parallel.techniques.tools.means import mean
from lightning_parallel.techniques.zero import Zero

__version__ = "0.1.0"

__all__ = [
    "AXES",
    "ActivationCheckpoint",
    "Compile",
    "ContextParallel",
    "ContextParallelStrategy",
    "DataParallel",
    "DataParallelStrategy",
    "ExpertParallel",
    "ExpertParallelStrategy",
    "HybridStrategy",
    "LayerParallelStrategy",
    "ParallelMesh",
    "ParallelPlan",
    "PipelineParallel",
    "PipelineParallelStrategy",
    "TensorParallel",
    "TensorParallelStrategy",
    "Zero",
    "ZeroStrategy",
    "__version__",
    "mean",
]

_NAMED: list[tuple[str, type[MeshStrategy], str, dict[str, Any]]] = [
    ("lp_layer_parallel", LayerParallelStrategy, "Layers on different ranks, run in turn", {}),
    ("lp_pipeline_parallel", PipelineParallelStrategy, "Layers on different ranks, 1F1B", {}),
    ("lp_context_parallel", ContextParallelStrategy, "Positions of each sequence on all ranks", {}),
    ("lp_expert_parallel", ExpertParallelStrategy, "Experts on all ranks, data parallel", {}),
    ("lp_data_parallel", DataParallelStrategy, "Data parallel on all ranks", {}),
    ("lp_tensor_parallel", TensorParallelStrategy, "Tensor parallel on all ranks", {}),
    *((f"lp_zero{stage}", ZeroStrategy, f"ZeRO stage {stage} on all ranks", {"stage": stage}) for stage in (1, 2, 3)),
]
for _name, _strategy, _description, _arguments in _NAMED:
    StrategyRegistry.register(_name, _strategy, _description, **_arguments)
    refuse_in_other(_name)
