"""The library serves Trainers of `lightning` or of `pytorch_lightning`; the other one is refused by its cause."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import sampled

ROOT = Path(__file__).parents[2]
WITHOUT_LIGHTNING = """
import sys
sys.modules["lightning"] = None
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader
import lightning_parallel

class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    def training_step(self, batch, batch_idx):
        loss = (self.layers(batch) - 1).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

def weights(strategy, devices):
    module, data = Regression(), torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, **quiet)
    trainer.fit(module, DataLoader(data, 8 // devices))
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

torch.set_num_threads(1)
expected = weights("auto", 1)
for stage in (2, 3):
    found = weights(lightning_parallel.ZeroStrategy(stage=stage, start_method="fork"), 2)
    torch.testing.assert_close(found, expected)
print("trained as on one device")
"""
BOTH = """
import {first}, {second}
import lightning_parallel
for strategy in (lightning_parallel.ZeroStrategy(), "lp_zero3"):
    try:
        pytorch_lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy)
    except ValueError as error:
        print(error)
"""
CAUSE = "for Trainers of lightning; for those of pytorch_lightning import pytorch_lightning before lightning_parallel"


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.launched
def test_trainer_of_pytorch_lightning_trains_as_on_one_device() -> None:
    assert "trained as on one device" in run("-c", WITHOUT_LIGHTNING)


@sampled(1, "first", ["lightning.pytorch", "pytorch_lightning"])
def test_other_trainer_names_the_import(first: str) -> None:
    second = "pytorch_lightning" if first == "lightning.pytorch" else "lightning.pytorch"
    said = run("-c", BOTH.format(first=first, second=second)).splitlines()
    assert [CAUSE in line for line in said] == [True, True]


@pytest.mark.exhaustive
def test_variable_chooses_where_both_are_imported() -> None:
    script = BOTH.format(first="lightning.pytorch", second="pytorch_lightning")
    assert not run("-c", script, LIGHTNING_PARALLEL_PACKAGE="pytorch_lightning")
