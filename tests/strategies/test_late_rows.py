"""Rows that other ranks stepped arrive behind the next forward, and nobody sees a parameter before they are there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_parallel import Compile, HybridStrategy, Zero, ZeroStrategy
from lightning_parallel.techniques.zero import arrivals, rows, states
from tests.benchmarks.delaying import BACKEND, Pace, pretended
from tests.models import Plain, loaders
from tests.ranks import begun_on_one, ranks, run_on_ranks
from tests.strategies.one_and_two import made, require_like
from tests.tiers import sampled
from tests.trainers import trainer

LATE = 0.03
HOOKS = (
    "on_train_batch_start",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "training_step",
    "on_before_zero_grad",
    "on_before_optimizer_step",
    "lr_scheduler_step",
    "optimizer_step",
    "on_train_batch_end",
    "on_validation_epoch_start",
    "on_save_checkpoint",
    "a callback",
)
ALWAYS = ("on_validation_epoch_start", "on_save_checkpoint")  # in steps of their own
FIRST = 2  # the first step is not behind any


class Reader(Plain):
    """In every step another hook looks at the parameters, and some change them."""

    def __init__(self) -> None:
        super().__init__(blocks=3)
        self.seen: dict[str, Any] = {}
        self.held = list(self.parameters())

    def look(self, hook: str) -> None:
        turn = (self.global_step - FIRST) % len(HOOKS) == HOOKS.index(hook) or hook in ALWAYS
        if turn and self.global_step >= FIRST:
            parameters = self.held if hook.startswith("on_before") else list(self.parameters())
            self.seen[f"{hook} {self.global_step}"] = [p.detach().norm().item() for p in parameters]
            if hook in ("on_train_batch_start", "on_before_optimizer_step", "a callback"):
                with torch.no_grad():
                    for parameter in parameters:
                        parameter.mul_(0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.look("training_step")
        output = super().training_step(batch, batch_idx)
        if self.global_step % 2:
            output["loss"] = output["loss"] + 1e-3 * sum(p.square().sum() for p in self.parameters())
        return output

    def on_train_batch_start(self, *_: Any) -> None:
        self.look("on_train_batch_start")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.look("on_before_batch_transfer")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.look("on_after_batch_transfer")
        return batch

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.look("on_before_zero_grad")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look("on_before_optimizer_step")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.look("optimizer_step")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)
        self.look("lr_scheduler_step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.look("on_train_batch_end")

    def on_validation_epoch_start(self) -> None:
        self.look("on_validation_epoch_start")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.look("on_save_checkpoint")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Looks(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.look("a callback")


@contextmanager
def rank_1_late() -> Iterator[None]:
    start = rows.Gathering.start

    def late(gathering: Any) -> Any:
        time.sleep(LATE if dist.get_rank() == 1 else 0.0)
        return start(gathering)

    with mock.patch.object(rows.Gathering, "start", late):
        yield


def read(strategy: Any, batch_size: int, accumulate: int) -> Any:
    torch.manual_seed(0)
    module = Reader()
    data = loaders("plain", batch_size, samples=8 * accumulate * (FIRST + 2 * len(HOOKS) + 2), val_samples=8)
    run = {"max_epochs": 1, "accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0, "val_check_interval": 4}
    checkpoints = ModelCheckpoint(every_n_train_steps=2)
    with rank_1_late():
        fit = trainer(made(strategy), callbacks=[Looks(), checkpoints], enable_checkpointing=True, **run)
        fit.fit(module, *data)
    state = torch.load(checkpoints.best_model_path, weights_only=False)["state_dict"] if fit.is_global_zero else None
    return module.seen, {name: value.clone() for name, value in module.state_dict().items()}, state


@pytest.mark.exhaustive
@sampled(1, ("stage", "accumulate"), [(1, 2), (1, 1), (2, 2)])
def test_every_hook_finds_what_one_device_has(stage: int, accumulate: int) -> None:
    begun = begun_on_one(read, None, 8, accumulate)
    first, second = run_on_ranks(2, read, partial(ZeroStrategy, stage=stage), 4, accumulate)
    expected = begun.result()
    assert {name.rpartition(" ")[0] for name in expected[0]} == set(HOOKS)
    require_like(expected, first)
    require_like(expected[:2], second[:2])


# ---------------------------------------------------------------- it is deferred


class Waiting(Plain):
    """Notes how many of its parameters still wait, when a step and when a block begins."""

    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.waiting: list[list[int]] = []
        for block in self.blocks:
            block.register_forward_pre_hook(self.note)

    def count(self) -> int:
        return sum(type(parameter) is arrivals.Arriving for parameter in self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.waiting.append([self.count()])
        return super().training_step(batch, batch_idx)

    def note(self, *_: Any) -> None:
        self.waiting[-1].append(self.count())


def small_buckets() -> Any:
    return mock.patch.multiple(states, BUCKET_BYTES=600)  # about one block


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_wait_for_their_own_rows_in_an_ordinary_run(tmp_path: Any, compiled: bool) -> None:
    module = Waiting()
    techniques = (Zero(stage=1), Compile(backend="eager")) if compiled else (Zero(stage=1),)
    callbacks = [ModelCheckpoint(every_n_train_steps=100), TQDMProgressBar(), LearningRateMonitor()]
    with small_buckets(), pretended(4, Pace()):
        run = {"max_steps": 5, "limit_val_batches": 0, "enable_checkpointing": True, "enable_progress_bar": True}
        fit = trainer(
            HybridStrategy(*techniques, process_group_backend=BACKEND),
            callbacks=callbacks,
            logger=CSVLogger(tmp_path),
            **run,
        )
        fit.fit(module, *loaders("plain", 1, samples=24))
    for at_start, *at_blocks in module.waiting[2:]:
        assert at_start >= 3 * 5  # of the five parameters of four blocks; one may share a bucket with others
        assert len(set(at_blocks)) >= 3
        assert at_blocks == sorted(at_blocks, reverse=True)
    assert not any(type(parameter) is arrivals.Arriving for parameter in module.parameters())


class Fails(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 3:
            raise ValueError("a mistake of the user's")
        return super().training_step(batch, batch_idx)


@ranks(2)
def test_an_exception_leaves_whole_parameters() -> None:
    torch.manual_seed(0)
    module: LightningModule = Fails(blocks=2)
    with rank_1_late(), pytest.raises(ValueError, match="of the user's"):
        trainer(ZeroStrategy(stage=1), max_epochs=1).fit(module, *loaders("plain", 2, samples=32))
    assert not any(type(parameter) is arrivals.Arriving for parameter in module.parameters())
    mine = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(mine, first)
