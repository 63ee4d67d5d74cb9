"""The library serves Trainers of `lightning` or of `pytorch_lightning`; the other one is refused by its cause."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import sampled

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("of_pytorch_lightning.py")
WITHOUT_LIGHTNING = """
import runpy, sys
sys.modules["lightning"] = None
runpy.run_path({path!r}, run_name="__main__")
"""
BOTH = """
import {first}, {second}
import lightning_parallel
for strategy in (lightning_parallel.ZeroStrategy(), "lp_zero3"):
    try:
        {trainer}.Trainer(accelerator="cpu", devices=2, strategy=strategy)
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
    assert "trained as on one device" in run("-c", WITHOUT_LIGHTNING.format(path=str(SCRIPT)))


@sampled(1, "first", ["lightning.pytorch", "pytorch_lightning"])
def test_other_trainer_names_the_import(first: str) -> None:
    second = "pytorch_lightning" if first == "lightning.pytorch" else "lightning.pytorch"
    said = run("-c", BOTH.format(first=first, second=second, trainer="pytorch_lightning")).splitlines()
    assert [CAUSE in line for line in said] == [True, True]


def test_variable_chooses_where_both_are_imported() -> None:
    script = BOTH.format(first="lightning.pytorch", second="pytorch_lightning", trainer="pytorch_lightning")
    assert not run("-c", script, LIGHTNING_PARALLEL_PACKAGE="pytorch_lightning")
