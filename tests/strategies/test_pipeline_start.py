"""A pipeline runs a step before the first, when everything exists that the step reads."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel import HybridStrategy, PipelineParallel, PipelineParallelStrategy, Zero
from tests.further.points import Handwritten
from tests.models import points
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import (
    PIPELINE,
    MakeStrategy,
    assert_like_one_device,
    made,
    require_like,
    scratch,
)
from tests.tiers import sampled
from tests.trainers import trainer


def data(batch: int = 8) -> DataLoader:
    return DataLoader(points(32, seed=1), batch)


def weights(module: LightningModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


class Scaled(Handwritten):
    """Scales its loss by what its start hooks and those of a callback have made."""

    validation_step = LightningModule.validation_step

    def on_fit_start(self) -> None:
        self.of_fit = torch.tensor(0.5)
        self.norm = sum(float(parameter.detach().norm()) for parameter in self.parameters())

    def on_train_start(self) -> None:
        self.of_train = torch.tensor([2.0, 1.0])
        with torch.no_grad():
            self.head.bias.copy_(self.stem.weight[:5, 0])  # of another stage

    def on_train_epoch_start(self) -> None:
        self.of_epoch = 1.0 + self.current_epoch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.of_batch = {"scale": 1.0 / (1 + batch_idx)}

    def loss(self, batch: Any) -> Tensor:
        scale = self.of_fit * self.of_train[0] * self.of_epoch * self.of_batch["scale"] * self.of_callback
        return super().loss(batch) * scale + 0.0 * self.norm


class Makes(Callback):
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.of_callback = 1.5  # type: ignore[assignment]


def scaled(strategy: MakeStrategy | None) -> Any:
    module = Scaled()
    trainer(made(strategy), max_epochs=2, callbacks=[Makes()]).fit(module, data())
    return weights(module)


def test_attributes_made_in_start_hooks() -> None:
    assert_like_one_device(scaled, 2, (None,), (PIPELINE,))


class LogsRate(Handwritten):
    """Logs its learning rate, and sets it in a step; in a step without gradients, which is not trained, to nonsense."""

    validation_step = LightningModule.validation_step

    def __init__(self, late: bool, of: type[torch.optim.Optimizer]) -> None:
        super().__init__(late)
        self.of, self.rates = of, list[float]()

    def configure_optimizers(self) -> Any:
        optimizer = self.of(self.parameters(), lr=0.1)  # type: ignore[call-arg]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        if self.global_step == 1 or not torch.is_grad_enabled():
            optimizer.param_groups[0]["lr"] = 0.05
        if not torch.is_grad_enabled():
            scheduler.last_epoch += 7
        assert self.trainer.optimizers[0] is optimizer.optimizer is scheduler.optimizer
        self.log("rate", optimizer.param_groups[0]["lr"])
        self.log("last_rate", scheduler.get_last_lr()[0])
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates += [float(self.trainer.callback_metrics[name]) for name in ("rate", "last_rate", "train_loss")]


def rates(strategy: MakeStrategy | None, late: bool, of: type[torch.optim.Optimizer], batch: int = 8) -> Any:
    module = LogsRate(late, of)
    trainer(made(strategy), max_epochs=2).fit(module, data(batch))
    return module.rates, weights(module)


HYBRID = partial(HybridStrategy, PipelineParallel(2, microbatches=2), Zero(2, stage=2))


@sampled(
    3,
    ("ranks", "strategy", "late", "of"),
    [
        (2, PIPELINE, False, torch.optim.SGD),
        (2, PIPELINE, False, torch.optim.Adagrad),  # has states when it is made
        (2, PIPELINE, True, torch.optim.Adagrad),
        (2, PIPELINE, True, torch.optim.AdamW),
        (4, HYBRID, False, torch.optim.Adagrad),
    ],
)
def test_optimizers_and_schedulers_in_steps(ranks: int, strategy: Any, late: bool, of: Any) -> None:
    expected = begun_on_one(rates, None, late, of)
    found = run_on_ranks(ranks, rates, strategy, late, of, 16 // ranks)
    require_like([expected.result()] * ranks, found)


class Resuming(Handwritten):
    """Changes what the checkpoint says of the rate, if it goes on from one."""

    validation_step = LightningModule.validation_step

    def on_train_start(self) -> None:
        self.scale = 0.5
        if self.current_epoch:
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5

    def loss(self, batch: Any) -> Tensor:
        return super().loss([batch[0] * self.scale, *batch[1:]])


class Saves(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(scratch() / "within.ckpt")

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(scratch() / "between.ckpt")


def resumed(strategy: MakeStrategy | None, late: bool) -> Any:
    whole, between, within = Resuming(late), Resuming(late), Resuming(late)
    trainer(made(strategy), max_epochs=2, callbacks=[Saves()]).fit(whole, data())
    trainer(made(strategy), max_epochs=2).fit(between, data(), ckpt_path=scratch() / "between.ckpt")
    if strategy is None:  # Lightning begins the epoch anew
        return weights(whole), weights(between), weights(whole)
    trainer(made(strategy), max_epochs=2).fit(within, data(), ckpt_path=scratch() / "within.ckpt")
    return weights(whole), weights(between), weights(within)


@pytest.mark.parametrize("late", [False, True])
def test_resumed_runs(late: bool) -> None:
    assert_like_one_device(resumed, 2, (None,), (PIPELINE,), late=late)


def not_run(strategy: MakeStrategy | None) -> Any:
    module = Resuming(late=True)
    trainer(made(strategy), max_steps=0).fit(module, data())
    return weights(module)


def test_run_without_a_batch_gives_back_the_weights() -> None:
    assert_like_one_device(not_run, 2, (None,), (PIPELINE,))


class Early(Handwritten):
    """Reads what comes into being after a sanity check, and after a checkpoint that is saved before the first batch."""

    def on_train_start(self) -> None:
        self.scale = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss([batch[0] * self.scale, *batch[1:]])


class SavesFirst(Callback):
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "first.ckpt")


def early(**options: Any) -> str:
    run = trainer(PipelineParallelStrategy(2, microbatches=2), max_epochs=1, **options)
    with pytest.raises(Exception, match="has no attribute 'scale'") as caught:
        run.fit(Early(), data(), data())
    return "\n".join(getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"before the first batch.*Trainer\(num_sanity_val_steps=0\) runs none then"),
        ({"num_sanity_val_steps": 0, "callbacks": [SavesFirst()]}, "a checkpoint is saved before it; save after"),
    ],
)
def test_what_is_not_there_yet_is_said(options: dict[str, Any], said: str) -> None:
    for notes in run_on_ranks(2, partial(early, **options)):
        assert re.search(said, notes), notes
