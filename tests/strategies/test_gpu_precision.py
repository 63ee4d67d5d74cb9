"""Half precision, fused optimizers and compiled blocks on a GPU: the curve of the host, but for rounding.

Where the host can do the same, it does so by default, so that the runs themselves are known to work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lightning_parallel import (
    ActivationCheckpoint,
    Compile,
    ContextParallelStrategy,
    DataParallelStrategy,
    HybridStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeroStrategy,
)
from tests.gpu import on_gpu
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.journeys import RUN, Journey, Place, check_journey, journey
from tests.techniques.tensor_layouts import hybrid

LAYOUTS: dict[str, tuple[int, Callable[..., Any], int]] = {
    "none": (1, HybridStrategy, 1),
    "dp2": (2, DataParallelStrategy, 2),
    "zero1": (2, partial(ZeroStrategy, stage=1), 2),
    "zero2 offloaded": (2, partial(ZeroStrategy, stage=2, offload=True), 2),
    "zero3": (2, partial(ZeroStrategy, stage=3), 2),
    "tp2": (2, partial(TensorParallelStrategy, 2), 1),
    "pp2": (2, partial(PipelineParallelStrategy, 2), 1),
    "cp2": (2, partial(ContextParallelStrategy, 2, method="ring"), 1),
}
FUSED = partial(torch.optim.AdamW, lr=1e-2, eps=1e-5, fused=True)
ROUNDING = 0.02
"""How far losses in half precision may be from those in double precision, as a share of them."""


def losses(found: Journey) -> torch.Tensor:
    return torch.tensor(found.first.losses + found.second.losses)


def check_half(precision: str, layout: str, place: Place) -> None:
    """Losses stay near the exact ones and fall as they do; the validation after them is near as well."""
    n, make, readers = LAYOUTS[layout]
    expected = begun_on_one(journey, None, 1, "host")
    half = RUN | {"precision": precision}
    for found in run_on_ranks(n, journey, make, readers, place, run=half):
        wanted = expected.result()
        torch.testing.assert_close(losses(found), losses(wanted), rtol=ROUNDING, atol=0)
        assert found.validated["val_loss"] == pytest.approx(wanted.validated["val_loss"], rel=ROUNDING)
        assert losses(found)[-1] < losses(found)[0]


def test_half_precision_on_the_host() -> None:
    check_half("bf16-mixed", "zero3", "host")


@on_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_half_precision(precision: str, layout: str) -> None:
    check_half(precision, layout, "gpu")


def check_fused(layout: str, place: Place, rtol: float) -> None:
    check_journey(*LAYOUTS[layout], place, rtol=rtol, optimizer=FUSED)


@pytest.mark.exhaustive
def test_the_fused_optimizer_on_the_host() -> None:
    check_fused("zero3", "host", 1e-10)


@on_gpu
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if "offloaded" not in layout])
def test_the_fused_optimizer(layout: str) -> None:
    check_fused(layout, "gpu", 1e-8)


@on_gpu
@pytest.mark.parametrize("make", [hybrid(Compile()), hybrid(ActivationCheckpoint(), Compile())])
def test_blocks_compiled_by_inductor(make: Callable[..., Any]) -> None:
    check_journey(1, make, 1, "gpu", rtol=1e-8)
