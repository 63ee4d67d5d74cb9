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
    import lightning.pytorch.overrides.distributed
    import lightning.pytorch.trainer.connectors.logger_connector.result
    from lightning import fabric as lightning_fabric
    from lightning import pytorch
else:
    import lightning_fabric
    import pytorch_lightning as lightning

    pytorch = lightning

VERSION = str(lightning.__version__)
if not VERSION.startswith("2.6."):
    raise ImportError(f"{PACKAGE} is {VERSION}, but lightning_parallel needs 2.6: pip install '{PACKAGE}>=2.6.6,<2.7'")

ClusterEnvironment = lightning_fabric.plugins.ClusterEnvironment
LightningEnvironment = lightning_fabric.plugins.environments.lightning.LightningEnvironment
SLURMEnvironment = lightning_fabric.plugins.environments.slurm.SLURMEnvironment
_ChildProcessObserver = lightning_fabric.strategies.launchers.subprocess_script._ChildProcessObserver
fabric_rank_zero = lightning_fabric.utilities.rank_zero
_update_properties = lightning_fabric.utilities.device_dtype_mixin._update_properties
_get_default_process_group_backend_for_device = (
    lightning_fabric.utilities.distributed._get_default_process_group_backend_for_device
)
_init_dist_connection = lightning_fabric.utilities.distributed._init_dist_connection
_set_num_threads_if_needed = lightning_fabric.utilities.distributed._set_num_threads_if_needed
MisconfigurationException = lightning_fabric.utilities.exceptions.MisconfigurationException
_IS_INTERACTIVE = lightning_fabric.utilities.imports._IS_INTERACTIVE
Callback = pytorch.Callback
LightningDataModule = pytorch.LightningDataModule
LightningModule = pytorch.LightningModule
Trainer = pytorch.Trainer
Accelerator = pytorch.accelerators.Accelerator
BaseFinetuning = pytorch.callbacks.BaseFinetuning
BasePredictionWriter = pytorch.callbacks.BasePredictionWriter
Checkpoint = pytorch.callbacks.Checkpoint
ModelCheckpoint = pytorch.callbacks.ModelCheckpoint
ModelPruning = pytorch.callbacks.ModelPruning
OnExceptionCheckpoint = pytorch.callbacks.OnExceptionCheckpoint
WeightAveraging = pytorch.callbacks.WeightAveraging
LightningOptimizer = pytorch.core.optimizer.LightningOptimizer
DummyLogger = pytorch.loggers.logger.DummyLogger
_IndexBatchSamplerWrapper = pytorch.overrides.distributed._IndexBatchSamplerWrapper
CheckpointIO = pytorch.plugins.CheckpointIO
DoublePrecision = pytorch.plugins.DoublePrecision
MixedPrecision = pytorch.plugins.MixedPrecision
Precision = pytorch.plugins.Precision
TorchCheckpointIO = pytorch.plugins.TorchCheckpointIO
ParallelStrategy = pytorch.strategies.ParallelStrategy
Strategy = pytorch.strategies.Strategy
StrategyRegistry = pytorch.strategies.StrategyRegistry
_MultiProcessingLauncher = pytorch.strategies.launchers._MultiProcessingLauncher
_SubprocessScriptLauncher = pytorch.strategies.launchers._SubprocessScriptLauncher
_interrupt = pytorch.trainer.call._interrupt
_Metadata = pytorch.trainer.connectors.logger_connector.result._Metadata
_ResultMetric = pytorch.trainer.connectors.logger_connector.result._ResultMetric
TrainerFn = pytorch.trainer.states.TrainerFn
TrainerStatus = pytorch.trainer.states.TrainerStatus
CombinedLoader = pytorch.utilities.CombinedLoader
rank_zero = pytorch.utilities.rank_zero
rank_zero_info = pytorch.utilities.rank_zero_info
SIGTERMException = pytorch.utilities.exceptions.SIGTERMException
is_overridden = pytorch.utilities.model_helpers.is_overridden
is_param_in_hook_signature = pytorch.utilities.signature_utils.is_param_in_hook_signature


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
