"""Rows that other ranks stepped arrive behind the next forward, and nobody sees a parameter before they are there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_parallel import Compile, HybridStrategy, Zero, ZeroStrategy
from lightning_parallel.techniques.zero import pending_gathers, states
from tests.benchmarks.delaying import BACKEND, Pace, pretended
from tests.models import Plain, loaders
from tests.ranks import ranks
from tests.trainers import trainer


@contextmanager
def rank_1_late() -> Iterator[None]:
    gather = states.gather_rows

    def late(*arguments: Any) -> Any:
        time.sleep(0.03 if dist.get_rank() == 1 else 0.0)
        return gather(*arguments)

    with mock.patch.object(states, "gather_rows", late):
        yield


def arriving(module: Plain) -> int:
    return sum(type(parameter) is pending_gathers.PendingParameter for parameter in module.parameters())


class Waiting(Plain):
    """Notes how many of its parameters still wait, when a step and when a block begins."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[list[int]] = []
        for block in self.blocks:
            block.register_forward_pre_hook(lambda *_: self.waiting[-1].append(arriving(self)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.waiting.append([arriving(self)])
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_wait_for_their_own_rows_in_an_ordinary_run(tmp_path: Any, compiled: bool) -> None:
    module = Waiting()
    techniques = (Zero(stage=1), Compile(backend="eager")) if compiled else (Zero(stage=1),)
    callbacks = [ModelCheckpoint(every_n_train_steps=100), TQDMProgressBar(), LearningRateMonitor()]
    run = {"max_steps": 5, "limit_val_batches": 0, "enable_checkpointing": True, "enable_progress_bar": True}
    with mock.patch.multiple(states, BUCKET_BYTES=600), pretended(4, Pace()):  # buckets of about one block
        strategy = HybridStrategy(*techniques, process_group_backend=BACKEND)
        fit = trainer(strategy, callbacks=callbacks, logger=CSVLogger(tmp_path), **run)
        fit.fit(module, *loaders("plain", 1, samples=24))
    for at_start, *at_blocks in module.waiting[2:]:
        assert at_start >= 3 * 5  # of the five parameters of four blocks; one may share a bucket with others
        assert len(set(at_blocks)) >= 3
        assert at_blocks == sorted(at_blocks, reverse=True)
    assert not arriving(module)


class Fails(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 3:
            raise ValueError("a mistake of the user's")
        return super().training_step(batch, batch_idx)


@ranks(2)
def test_parameters_are_whole_after_an_exception() -> None:
    torch.manual_seed(0)
    module = Fails(blocks=2)
    with rank_1_late(), pytest.raises(ValueError, match="of the user's"):
        trainer(ZeroStrategy(stage=1), max_epochs=1).fit(module, *loaders("plain", 2, samples=32))
    assert not arriving(module)
    mine = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(mine, first)
