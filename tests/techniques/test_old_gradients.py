"""Gradients of the batch before, in a step of a pipeline: as on one device for who reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_parallel import DataParallel, HybridStrategy, PipelineParallel, Zero
from tests.ranks import on_one, run_on_ranks
from tests.tiers import covering
from tests.trainers import trainer

BATCHES, BATCH = 5, 8
NEVER: list[int] = []


class Reading(LightningModule):
    """Reads the gradient of its head before it has a new one, in some batches."""

    def __init__(self, batches: list[int]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(6, 3)
        self.double()
        self.batches = batches

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        (reader,) = (each for each in self.trainer.callbacks if isinstance(each, Reader))
        for block in self.blocks:
            x = block(x)
        if batch_idx in self.batches:
            reader.note(batch_idx, self.head.weight.grad)
        return self.head(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Reader(Callback):
    """Keeps what was read; steps keep nothing that a microbatch put on the module."""

    def __init__(self) -> None:
        self.found: dict[int, float | None] = {}

    def note(self, batch_idx: int, gradient: Tensor | None) -> None:
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        value = None if whole is None else float(whole.norm())
        assert self.found.setdefault(batch_idx, value) == value


class BeforeZero(Reader):
    """Reads before Lightning sets gradients to zero."""

    def on_before_zero_grad(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.note(trainer.fit_loop.epoch_loop.batch_idx, next(iter(optimizer.param_groups[0]["params"])).grad)


def read(
    module: Reading, technique: PipelineParallel | None, other: Any, reader: Reader, accumulate: int = 1
) -> tuple[dict[int, float | None], dict[str, Tensor]]:
    techniques = [each for each in (technique, other) if each is not None]
    strategy, devices = (HybridStrategy(*techniques), None) if techniques else ("auto", 1)
    readers = 1 if other is None else 2
    data = torch.randn(BATCH * BATCHES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    run = trainer(strategy, devices, max_epochs=1, accumulate_grad_batches=accumulate, callbacks=[reader])
    run.fit(module, DataLoader(data, BATCH // readers))
    assert "grad" not in vars(nn.Parameter)
    return reader.found, {name: value.clone() for name, value in module.state_dict().items()}


LAYOUTS = {"alone": (2, None), "data": (4, DataParallel(2)), "zero 2": (4, Zero(2, stage=2))}
SCHEDULES = {"1f1b": 2, "interleaved_1f1b": 2, "zbv": 4}


@covering(keep=1, layout=LAYOUTS, schedule=SCHEDULES, batches=([0, 1, 2, 3, 4], [2], NEVER), accumulate=(1, 2))
def test_who_reads_them_sees_those_of_the_batch_before(
    layout: str, schedule: str, batches: list[int], accumulate: int
) -> None:
    size, other = LAYOUTS[layout]
    technique = PipelineParallel(2, schedule=schedule, microbatches=SCHEDULES[schedule], split=None)
    expected, weights = on_one(read, Reading(batches), None, None, Reader(), accumulate)
    ranks = run_on_ranks(size, read, Reading(batches), technique, other, Reader(), accumulate)
    found = {batch_idx: value for on_rank, _ in ranks for batch_idx, value in on_rank.items()}
    assert found.keys() == expected.keys()
    if layout == "data":  # which reduces what accumulates in the last batch only
        found, expected = ({k: v for k, v in each.items() if k % accumulate == 0} for each in (found, expected))
    assert found == pytest.approx(expected)
    for _, own in ranks:
        torch.testing.assert_close(own, weights)


def test_hook_before_they_are_set_to_zero_sees_them() -> None:
    expected, _ = on_one(read, Reading(NEVER), None, None, BeforeZero())
    first, _ = run_on_ranks(2, read, Reading(NEVER), PipelineParallel(2, microbatches=2), None, BeforeZero())[0]
    assert first == pytest.approx(expected)
