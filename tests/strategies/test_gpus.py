"""Strategies on GPUs: a run, its checkpoint, validation and predictions are those of one process on the host.

Ranks share one GPU where there are not enough. Where the host can do the same, exhaustive tests do it there,
so that the runs themselves are known to work.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_parallel import (
    ActivationCheckpoint,
    Compile,
    ContextParallel,
    ContextParallelStrategy,
    DataParallel,
    ExpertParallel,
    HybridStrategy,
    PipelineParallelStrategy,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from tests.gpu import on_gpu
from tests.layouts import LAYOUTS as SHARED
from tests.layouts import PP2, Layout, hybrid, layouts
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.journeys import RUN, Journey, Place, check_journey, journey

NAMES = ("data parallel", "data parallel of 4", "zero 1", "zero 1, offloaded", "zero 2", "zero 2, offloaded", "zero 3",
         "tensor x zero 3", "pipeline x zero 1", "pipeline x tensor", "context x zero 3", "zbv")  # fmt: skip
LAYOUTS = layouts(*NAMES) | {
    "none": Layout(1, 1, HybridStrategy),
    "zero 3, offloaded": Layout(2, 2, partial(ZeroStrategy, offload=True)),
    "hsdp": Layout(4, 4, partial(ZeroStrategy, 2, replicate=2)),
    "tensor, overlapping": Layout(2, 1, hybrid(TensorParallel(2, overlap=True))),
    "tensor of 4": Layout(4, 1, partial(TensorParallelStrategy, 4)),
    "pipeline of 4": Layout(4, 1, partial(PipelineParallelStrategy, 4)),
    "ring of 4": Layout(4, 1, partial(ContextParallelStrategy, 4, method="ring")),
    "ulysses": Layout(2, 1, hybrid(ContextParallel(2, method="ulysses"))),
    "expert x pipeline": Layout(4, 2, hybrid(DataParallel(2), PP2, ExpertParallel(2))),
    "zero 3, recomputed and compiled": Layout(2, 2, hybrid(Zero(2), ActivationCheckpoint(), Compile())),
    "compiled": Layout(1, 1, hybrid(ActivationCheckpoint(), Compile())),
}


def check(layout: str, place: Place, rtol: float, **options: Any) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    check_journey(ranks, strategy, readers, place, rtol=rtol, **options)


@on_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_on_gpus_train_as_one_process_on_the_host(layout: str) -> None:
    check(layout, "gpu", 1e-8, column="moe" if "expert" in layout else "gpt")


HALF: dict[str, tuple[str, Layout]] = {
    "none": ("bf16-mixed", LAYOUTS["none"]),
    "data parallel": ("bf16-mixed", SHARED["data parallel"]),
    "zero 1": ("bf16-mixed", SHARED["zero 1"]),
    "ring": ("bf16-mixed", Layout(2, 1, partial(ContextParallelStrategy, 2, method="ring"))),
    "zero 2, offloaded": ("16-mixed", SHARED["zero 2, offloaded"]),
    "zero 3": ("16-mixed", SHARED["zero 3"]),
    "tensor parallel": ("16-mixed", SHARED["tensor parallel"]),
    "pipeline": ("16-mixed", Layout(2, 1, partial(PipelineParallelStrategy, 2))),
}
FUSED = partial(torch.optim.AdamW, lr=1e-2, eps=1e-5, fused=True)
ROUNDING = 0.02
"""How far losses in half precision may be from those in double precision, as a share of them."""


def losses(found: Journey) -> torch.Tensor:
    return torch.tensor(found.first.losses + found.second.losses)


def check_half(layout: str, place: Place, precision: str | None = None) -> None:
    """Losses stay near the exact ones and fall as they do; the validation after them is near as well."""
    usual, (n, readers, make) = HALF[layout]
    expected = begun_on_one(journey, None, 1, "host")
    half = RUN | {"precision": precision or usual}
    for found in run_on_ranks(n, journey, make, readers, place, run=half):
        wanted = expected.result()
        torch.testing.assert_close(losses(found), losses(wanted), rtol=ROUNDING, atol=0)
        assert found.validated["val_loss"] == pytest.approx(wanted.validated["val_loss"], rel=ROUNDING)
        assert losses(found)[-1] < losses(found)[0]


@on_gpu
@pytest.mark.parametrize("layout", HALF)
def test_half_precision(layout: str) -> None:
    check_half(layout, "gpu")


@on_gpu
@pytest.mark.parametrize("layout", ["data parallel", "zero 3", "tensor of 4", "zbv"])
def test_fused_optimizer(layout: str) -> None:
    check(layout, "gpu", 1e-8, optimizer=FUSED)


@pytest.mark.exhaustive
def test_half_precision_and_fused_optimizer_on_the_host() -> None:
    check_half("zero 3", "host", "bf16-mixed")
    check("zero 3", "host", 1e-10, optimizer=FUSED)
