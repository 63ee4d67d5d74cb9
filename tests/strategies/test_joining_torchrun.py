"""Ranks that torchrun starts, which keeps the store where they meet, and one that does not live to join the others."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("joining.py")
ROOT = SCRIPT.parents[2]

pytestmark = pytest.mark.launched


def started(event: str, folder: Path, *options: str, nodes: int = 1) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), event, str(nodes), str(folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said_by(run: "subprocess.Popen[str]") -> str:
    """All that was on screen when the run had ended by itself."""
    try:
        return run.communicate(timeout=170)[0]  # the strategy's timeout is longer: nobody waits for that
    finally:
        run.kill()


def test_ranks_of_torchrun_join_and_train(tmp_path: Path) -> None:
    run = started("nothing", tmp_path, "--standalone", "--nproc-per-node", "2")
    said = said_by(run)
    assert run.returncode == 0, said
    assert "rank 0 finished after step 3" in said
    assert "rank 1 finished after step 3" in said


@pytest.mark.exhaustive
def test_one_that_is_killed_before_it_joins_is_named_by_torchrun(tmp_path: Path) -> None:
    """Which ends the others at once, before they can tell."""
    run = started("dies", tmp_path, "--standalone", "--nproc-per-node", "2")
    said = said_by(run)
    assert re.search(r"Root Cause[^/]*rank +: 1 [^/]*exitcode +: -9 ", said), said
