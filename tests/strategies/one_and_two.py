"""The same run on one device and in a pipeline of two ranks, and whether both saw the same."""

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_parallel import PipelineParallelStrategy
from tests.ranks import begun_on_one, run_on_ranks

MakeStrategy = Callable[[], Any]
PIPELINE = partial(PipelineParallelStrategy, 2, microbatches=4)
ZBV = partial(PipelineParallelStrategy, 2, schedule="zbv", microbatches=4)


def scratch() -> Path:
    return Path(os.environ["RANKS_SCRATCH"])


def made(strategy: MakeStrategy | None) -> Any:
    if strategy is None:  # Lightning's own: it warns wherever a process group exists, even of one rank
        warnings.filterwarnings("ignore", ".*sync_dist=True")
        return "auto"
    return strategy()


def on_one_and_two(run: Callable[..., Any], strategy: MakeStrategy = PIPELINE, **options: Any) -> tuple[Any, list[Any]]:
    expected = begun_on_one(run, None, **options)
    found = run_on_ranks(2, run, strategy, **options)
    return expected.result(), found


def require_like(expected: Any, found: Any) -> None:
    """Nested lists and dicts of numbers, the same but for rounding."""
    if isinstance(expected, dict):
        assert expected.keys() == found.keys()
        for key in expected:
            require_like(expected[key], found[key])
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(found)
        for wanted, got in zip(expected, found, strict=True):
            require_like(wanted, got)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
