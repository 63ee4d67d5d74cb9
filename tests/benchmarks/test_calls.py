"""Calls of this package's functions in one training step, and the files they lie in. Counts have no noise.

The model is Hugging Face's Llama with four blocks; it logs its loss. A step lasts from the start of one batch to that
of the next, in the middle of an epoch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

import lightning_parallel
from lightning_parallel import (
    DataParallelStrategy,
    HybridStrategy,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from tests.models import build, loaders
from tests.ranks import run_on_ranks
from tests.trainers import trainer

pytestmark = [pytest.mark.benchmark, pytest.mark.filterwarnings("ignore")]

PACKAGE = Path(lightning_parallel.__file__).parent
STEP = 2  # counted from 0: by then everything that happens once has happened
LAYOUTS = {
    "DataParallel()": (2, DataParallelStrategy),
    "Zero(stage=1)": (2, lambda: ZeroStrategy(stage=1)),
    "Zero(stage=3)": (2, lambda: ZeroStrategy(stage=3)),
    "TensorParallel()": (2, TensorParallelStrategy),
    "PipelineParallel()": (2, PipelineParallelStrategy),
    "PipelineParallel(2) x TensorParallel(2) x Zero(2, stage=1)": (
        8,
        lambda: HybridStrategy(PipelineParallel(2), TensorParallel(2), Zero(2, stage=1)),
    ),
}


class Calls(Callback):
    """Counts the calls of one step on this rank, for every file of the package."""

    def __init__(self) -> None:
        self.of_file: Counter[str] = Counter()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        sys.setprofile(self.note if batch_idx == STEP else None)

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE) and not is_inline(frame.f_code):
            self.of_file[str(file.relative_to(PACKAGE))] += 1


def is_inline(code: CodeType) -> bool:
    return code.co_name.startswith("<")  # comprehensions and lambdas


def count(make_strategy: Callable[[], Any]) -> Counter[str]:
    calls = Calls()
    trainer(make_strategy(), callbacks=[calls], max_epochs=1).fit(build("llama"), *loaders("llama", 8, samples=128))
    return calls.of_file


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_of_a_step(capsys: pytest.CaptureFixture[str], layout: str) -> None:
    ranks, make_strategy = LAYOUTS[layout]
    of_file = run_on_ranks(ranks, count, make_strategy, timeout=120.0, limit=300.0)[0]
    folders: Counter[str] = Counter()
    for file, calls in of_file.items():
        folders["/".join(Path(file).parts[:2])] += calls
    with capsys.disabled():
        print(f"\n\n{layout}, rank 0: {of_file.total()} calls, {len(of_file)} files")
        print("\n".join(f"  {folder}: {calls}" for folder, calls in sorted(folders.items())))
