"""Runs that hang, as real processes: what the one that a user started says in the end names the rank that is behind."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

SCRIPT = Path(__file__).with_name("hanging.py")
ROOT = SCRIPT.parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")

pytestmark = pytest.mark.launched


class Hang(NamedTuple):
    """How processes are started, and which rank does what."""

    start_method: str
    event: str
    rank: int
    ranks: int


def ended(hang: Hang) -> str:
    """What was on screen when the run had ended by itself."""
    started = (*TORCHRUN, str(hang.ranks)) if hang.start_method == "torchrun" else ()
    words = [str(word).replace("torchrun", "popen") for word in hang]
    done = subprocess.run(
        [sys.executable, *started, str(SCRIPT), *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0, done.stdout
    return done.stdout


def last_words(said: str) -> str:
    """Of the process that started the others: the last line but for rules and torchrun's own."""
    return [line for line in said.splitlines() if line.strip() and not set(line) <= {"=", "-"}][-1]


BEHIND = r"rank {} is behind: it "
SLEEPS = rf"{BEHIND}is in hang \(hanging.py:\d+\) of step 3, at .*hanging.py:\d+ in hang; the others wait in "
LEFT_OUT = rf"{BEHIND}waits in .* of step 3, at .*; the others wait in barrier \(distributed_c10d.py:\d+\) of step 3"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("hang", "words"),
    [
        (Hang("fork", "leaves a collective out", 1, 3), LEFT_OUT),
        pytest.param(Hang("popen", "sleeps", 0, 2), SLEEPS, marks=pytest.mark.exhaustive),  # it launched the other
        pytest.param(Hang("torchrun", "sleeps", 1, 2), SLEEPS, marks=pytest.mark.exhaustive),
        pytest.param(Hang("popen", "sleeps", 1, 3), SLEEPS, marks=pytest.mark.exhaustive),
        pytest.param(Hang("spawn", "sleeps", 1, 2), SLEEPS, marks=pytest.mark.exhaustive),
        pytest.param(Hang("popen", "leaves a collective out", 2, 3), LEFT_OUT, marks=pytest.mark.exhaustive),
        pytest.param(Hang("torchrun", "leaves a collective out", 2, 3), LEFT_OUT, marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, Hang) else "",
)
def test_the_launcher_says_who_is_behind(hang: Hang, words: str) -> None:
    said = ended(hang)
    assert re.search(words.format(hang.rank), last_words(said)), said
