"""Strategies on GPUs and NCCL, on two where there are two: the same values, and the module back on the host."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import on_gpu
from tests.strategies.on_gpus import STRATEGIES

SCRIPT = Path(__file__).with_name("on_gpus.py")


@on_gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gpus_train_as_one_does_without_a_strategy(strategy: str, tmp_path: Path) -> None:
    require_equal(strategy, "gpu", str(min(2, torch.cuda.device_count())), tmp_path)


@on_gpu
@pytest.mark.parametrize("strategy", ["zero2_offload", "zbv"])
def test_launched_ranks_share_a_gpu(strategy: str, tmp_path: Path) -> None:
    require_equal(strategy, "gpu", "shared", tmp_path)


@pytest.mark.launched
@pytest.mark.exhaustive
def test_script_trains_on_the_host(tmp_path: Path) -> None:
    require_equal("zbv", "cpu", "2", tmp_path)


def require_equal(strategy: str, accelerator: str, devices: str, folder: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), strategy, accelerator, devices, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal" in done.stdout
