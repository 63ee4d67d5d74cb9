"""LightningCLI: a hybrid written in YAML, each technique as class_path and init_args."""

import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from lightning_parallel import ActivationCheckpoint, HybridStrategy, PipelineParallel, TensorParallel, Zero
from recipes.gpt import GPTModule
from tests.models import OWN, loaders
from tests.ranks import ranks

HYBRID = """
seed_everything: 7
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  plugins:
    - class_path: tests.trainers.PoolEnvironment
  strategy:
    class_path: lightning_parallel.HybridStrategy
    init_args:
      techniques:
        - class_path: lightning_parallel.TensorParallel
          init_args: {size: 2}
        - class_path: lightning_parallel.ActivationCheckpoint
      plan:
        class_path: lightning_parallel.ParallelPlan
        init_args: {blocks: network.blocks.*}
"""


class Model(GPTModule):
    def __init__(self, layers: int = 2) -> None:
        super().__init__(OWN | {"n_layers": layers})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return loaders("own_gpt", 4).train

    def val_dataloader(self) -> DataLoader:
        return loaders("own_gpt", 4).val


def from_yaml(folder: Path, text: str, run: bool = True) -> LightningCLI:
    (folder / "run.yaml").write_text(text)
    command = [*(["fit"] if run else []), "-c", str(folder / "run.yaml")]
    # Lightning 2.6 calls jsonargparse by names that it has deprecated since
    quiet = patch.dict(os.environ, JSONARGPARSE_DEPRECATION_WARNINGS="off")
    with quiet, patch.object(sys, "argv", ["script.py", *command]):
        return LightningCLI(Model, Data, save_config_callback=None, run=run)


@ranks(2)
def test_hybrid_trains_from_a_file(tmp_path: Path) -> None:
    trainer = from_yaml(tmp_path, HYBRID).trainer
    assert trainer.global_step == 2
    assert trainer.strategy.techniques == (TensorParallel(2), ActivationCheckpoint())


def test_options_of_techniques_can_be_written_and_wrong_ones_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = HYBRID.replace("TensorParallel", "PipelineParallel").replace("ActivationCheckpoint", "Zero")
    text = pipeline.replace("{size: 2}", "{size: 2, schedule: zbv, split: [1, 1, 1, 1]}")
    strategy = from_yaml(tmp_path, text, run=False).trainer.strategy
    assert strategy.techniques == (PipelineParallel(2, schedule="zbv", split=(1, 1, 1, 1)), Zero())
    with pytest.raises(SystemExit):
        from_yaml(tmp_path, HYBRID.replace("{size: 2}", "{sise: 2}"), run=False)
    assert "sise" in capsys.readouterr().err


def test_list_and_arguments_of_techniques_are_the_same() -> None:
    assert HybridStrategy(techniques=[Zero(2)]).techniques == HybridStrategy(Zero(2)).techniques
    assert HybridStrategy(techniques=[]).techniques == ()
