"""While `configure_model` builds and ranks divide, a rank has its part of the model and about one full parameter."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_parallel import (
    HybridStrategy,
    ParallelPlan,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from lightning_parallel.strategies.model.divided_model import DividedModel
from tests.live import LiveBytes
from tests.ranks import run_on_ranks
from tests.trainers import trainer

DEPTH, WIDTH, INNER = 6, 32, 256
PLAN = ParallelPlan(blocks=("layers.*",), styles={"layers.*.0": "colwise", "layers.*.2": "rowwise"})
LARGEST = 4 * WIDTH * INNER


class Deep(LightningModule):
    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live, self.layers = [live], nn.ModuleList()

    def configure_model(self) -> None:
        if not len(self.layers):
            with self.live[0]:
                for _ in range(DEPTH):
                    self.layers.append(nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = batch + layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def built(make_strategy: Any, data_ranks: int) -> None:
    live, divide, parts = LiveBytes(), DividedModel.divide, list[int]()
    module = Deep(live)

    def measured(self: DividedModel, *args: Any) -> None:
        with live:
            divide(self, *args)
        held: list[Any] = list(module.parameters())
        parts.append(sum(4 * (p._local_tensor if isinstance(p, DTensor) else p).numel() for p in held))

    DividedModel.divide = measured  # type: ignore[method-assign]
    try:
        run = trainer(make_strategy(), max_steps=1)
        run.fit(module, DataLoader(torch.ones(4, WIDTH), 4 // data_ranks))
    finally:
        DividedModel.divide = divide  # type: ignore[method-assign]
    full = sum(4 * parameter.numel() for parameter in module.parameters())
    (part,) = parts
    assert part < 0.6 * full
    assert live.peak < max(part, full / run.world_size) + 1.7 * LARGEST, (live.peak, part, full, LARGEST)


LAYOUTS: dict[str, tuple[int, int, Any]] = {
    "zero 3": (2, 2, partial(ZeroStrategy, plan=PLAN)),
    "tensor parallel": (2, 1, partial(TensorParallelStrategy, 2, plan=PLAN)),
    "pipeline": (2, 1, partial(PipelineParallelStrategy, 2, microbatches=2, plan=PLAN)),
    "zero 3 and tensor parallel": (4, 2, partial(HybridStrategy, Zero(2), TensorParallel(2), plan=PLAN)),
    "pipeline and zero 3": (4, 2, partial(HybridStrategy, PipelineParallel(2, microbatches=2), Zero(2), plan=PLAN)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_has_its_part_and_one_full_parameter(layout: str) -> None:
    ranks, data_ranks, make_strategy = LAYOUTS[layout]
    run_on_ranks(ranks, built, make_strategy, data_ranks)
