"""Choose the Lightning package of this process: `lightning` or `pytorch_lightning`, which copies the same classes.

A Trainer accepts only strategies of its own package. So one package is chosen when this module is first imported, and
all other modules of the library import Lightning's names from here:

1. the package that the environment variable `LIGHTNING_PARALLEL_PACKAGE` names,
2. else `pytorch_lightning`, if it is imported already and `lightning.pytorch` is not, or if only it is installed,
3. else `lightning`.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

VARIABLE = "LIGHTNING_PARALLEL_PACKAGE"
CHOICES = ("lightning", "pytorch_lightning")
ONLY_OTHER = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
PACKAGE = os.environ.get(VARIABLE, CHOICES[ONLY_OTHER or find_spec("lightning") is None])
if PACKAGE not in CHOICES:
    raise ValueError(f"{VARIABLE}={PACKAGE!r} is none of {', '.join(map(repr, CHOICES))}")
OTHER = CHOICES[CHOICES[0] == PACKAGE]
REMEDY = f"import {OTHER} before lightning_parallel and nothing of {PACKAGE}, or set {VARIABLE}={OTHER}"

if TYPE_CHECKING or PACKAGE == "lightning":
    import lightning
    import lightning.fabric as lightning_fabric
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
    from lightning.fabric.utilities import rank_zero as fabric_rank_zero
    from lightning.fabric.utilities.device_dtype_mixin import _update_properties
    from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device
    from lightning.fabric.utilities.distributed import _init_dist_connection, _set_num_threads_if_needed
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.fabric.utilities.imports import _IS_INTERACTIVE
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        BasePredictionWriter,
        Checkpoint,
        ModelCheckpoint,
        ModelPruning,
    )
    from lightning.pytorch.callbacks import OnExceptionCheckpoint, StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
    from lightning.pytorch.plugins import CheckpointIO, DoublePrecision, MixedPrecision, Precision, TorchCheckpointIO
    from lightning.pytorch.strategies import ParallelStrategy, Strategy, StrategyRegistry
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
    from lightning.pytorch.trainer.call import _interrupt
    from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
    from lightning.pytorch.utilities import CombinedLoader, rank_zero, rank_zero_info
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
else:
    import pytorch_lightning as lightning
    import lightning_fabric
    from lightning_fabric.plugins import ClusterEnvironment
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning_fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
    from lightning_fabric.utilities import rank_zero as fabric_rank_zero
    from lightning_fabric.utilities.device_dtype_mixin import _update_properties
    from lightning_fabric.utilities.distributed import _get_default_process_group_backend_for_device
    from lightning_fabric.utilities.distributed import _init_dist_connection, _set_num_threads_if_needed
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from lightning_fabric.utilities.imports import _IS_INTERACTIVE
    from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
    from pytorch_lightning.accelerators import Accelerator
    from pytorch_lightning.callbacks import (
        BaseFinetuning,
        BasePredictionWriter,
        Checkpoint,
        ModelCheckpoint,
        ModelPruning,
    )
    from pytorch_lightning.callbacks import OnExceptionCheckpoint, StochasticWeightAveraging, WeightAveraging
    from pytorch_lightning.core.optimizer import LightningOptimizer
    from pytorch_lightning.loggers.logger import DummyLogger
    from pytorch_lightning.overrides.distributed import _IndexBatchSamplerWrapper
    from pytorch_lightning.plugins import CheckpointIO, DoublePrecision, MixedPrecision, Precision, TorchCheckpointIO
    from pytorch_lightning.strategies import ParallelStrategy, Strategy, StrategyRegistry
    from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
    from pytorch_lightning.trainer.call import _interrupt
    from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric
    from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
    from pytorch_lightning.utilities import CombinedLoader, rank_zero, rank_zero_info
    from pytorch_lightning.utilities.exceptions import SIGTERMException
    from pytorch_lightning.utilities.model_helpers import is_overridden
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

VERSION = str(lightning.__version__)
if not VERSION.startswith("2.6."):
    raise ImportError(f"{PACKAGE} is {VERSION}, but lightning_parallel needs 2.6: pip install '{PACKAGE}>=2.6.6,<2.7'")


class StrategyOfPackage(ParallelStrategy):
    """Strategy whose `repr`, which the Trainer of the other package prints when it refuses it, names the cause."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for Trainers of {PACKAGE}; for those of {OTHER} {REMEDY}>"


def refuse_in_other(name: str) -> None:
    """Register `name` in the other package, if it is imported, so that its Trainer raises an error with the cause."""
    strategies = sys.modules.get("lightning.pytorch.strategies" if OTHER == "lightning" else f"{OTHER}.strategies")

    def refuse() -> NoReturn:
        raise ValueError(f"{name!r} is a strategy for Trainers of {PACKAGE}; for those of {OTHER} {REMEDY}")

    if strategies is not None:
        strategies.StrategyRegistry.register(name, refuse, override=True)
