"""Rows that other ranks stepped arrive behind the next forward, and nobody sees a parameter before they are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_parallel import Compile, HybridStrategy, Zero, ZeroStrategy
from lightning_parallel.techniques.zero import arrivals, states
from tests.benchmarks.delaying import BACKEND, Pace, pretended
from tests.models import Plain, loaders
from tests.ranks import ranks
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.trainers import trainer

HOOKS = ("on_train_batch_start", "on_before_batch_transfer", "on_before_zero_grad", "on_before_optimizer_step")
HOOKS += ("on_train_batch_end", "on_validation_epoch_start", "on_save_checkpoint")
CHANGING = ("on_train_batch_start", "on_before_optimizer_step")
FIRST = 2  # the first step is not behind any


class Reader(Plain):
    """In every step another hook looks at the parameters, and some change them."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.AdamW, lr=1e-2), blocks=3)
        self.seen: dict[str, Any] = {}

    def look(self, hook: str) -> None:
        turn = (self.global_step - FIRST) % len(HOOKS) == HOOKS.index(hook) or hook in HOOKS[-2:]
        if turn and self.global_step >= FIRST:
            parameters = list(self.parameters())
            self.seen[f"{hook} {self.global_step}"] = [p.detach().norm().item() for p in parameters]
            with torch.no_grad():
                for parameter in parameters if hook in CHANGING else ():
                    parameter.mul_(0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if self.global_step % 2:
            output["loss"] = output["loss"] + 1e-3 * sum(p.square().sum() for p in self.parameters())
        return output


def looking(hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def look(self: Reader, *args: Any, **kwargs: Any) -> Any:
        self.look(hook)
        return function(self, *args, **kwargs)

    return look


for name in HOOKS:
    setattr(Reader, name, looking(name, getattr(Reader, name)))


@contextmanager
def rank_1_late() -> Iterator[None]:
    gather = states.gather_rows

    def late(*arguments: Any) -> Any:
        time.sleep(0.03 if dist.get_rank() == 1 else 0.0)
        return gather(*arguments)

    with mock.patch.object(states, "gather_rows", late):
        yield


def read(strategy: Any, batch_size: int) -> Any:
    torch.manual_seed(0)
    module = Reader()
    data = loaders("plain", batch_size, samples=16 * (FIRST + 2 * len(HOOKS) + 2), val_samples=8)
    run = {"max_epochs": 1, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "val_check_interval": 4}
    saver = ModelCheckpoint(every_n_train_steps=2)
    with rank_1_late():
        trainer(made(strategy), callbacks=[saver], enable_checkpointing=True, **run).fit(module, *data)
    return module.seen, {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2])
def test_every_hook_finds_what_one_device_has(stage: int) -> None:
    assert_like_one_device(read, 2, (None, 8), (partial(ZeroStrategy, stage=stage), 4))


# ---------------------------------------------------------------- it is deferred


def arriving(module: Plain) -> int:
    return sum(type(parameter) is arrivals.Arriving for parameter in module.parameters())


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
