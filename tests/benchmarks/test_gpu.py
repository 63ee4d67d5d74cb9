"""The benchmark of one GPU runs, in small and on the CPU; its figures of a step are those of a formula by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.benchmarks.gpu.setting import SIZES, Device
from tests.benchmarks.gpu.variants import VARIANTS

ROOT = Path(__file__).parents[2]


@pytest.mark.launched
@pytest.mark.exhaustive
def test_it_runs_in_small_on_the_cpu(tmp_path: Path) -> None:
    results = tmp_path / "gpu.json"
    few = ["--minutes", "0.01", "--rounds", "1", "--backend", "eager"]
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--device", "cpu", "--size", "nano", *few]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--results", str(results)], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())
    assert found["training"].keys() == VARIANTS.keys()
    assert all(told["tokens_per_second"] > 0 and told["utilisation"] > 0 for told in found["training"].values())
    assert all(name in done.stdout for name in VARIANTS)


def test_operations_of_a_step_are_those_that_torch_counts() -> None:
    """Which counts all scores of the attention, not the half that a causal mask leaves."""
    job = SIZES["nano"]
    module = job.module()
    module.configure_model()
    batch = next(iter(job.batches(1, Device("cpu"))))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module._loss(batch)[0].backward()
    config = job.config
    half_of_attention = 3 * job.tokens * config.n_layers * 4 * config.dim * config.context / 2
    assert counter.get_total_flops() == pytest.approx(job.flops + half_of_attention, rel=1e-3)
    assert SIZES["gpt-1b"].flops == pytest.approx(6 * 1.076e9 * 16384 + 3 * 16384 * 16 * 2 * 2048 * 2048, rel=1e-3)
