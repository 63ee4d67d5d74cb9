"""A pipeline runs a step before the first, when everything exists that the step reads; it leaves order and draws."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel import PipelineParallelStrategy
from tests.further.points import Handwritten
from tests.layouts import LAYOUTS
from tests.models import points
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import PIPELINE, MakeStrategy, made, require_like
from tests.tiers import sampled
from tests.trainers import trainer


def data(batch: int = 8) -> DataLoader:
    return DataLoader(points(32, seed=1), batch)


def weights(module: LightningModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


class Trained(Handwritten):
    """Is not validated."""

    validation_step = LightningModule.validation_step


class Scaled(Trained):
    """Scales its loss by what its start hooks and those of a callback have made, and logs and sets its learning rate.

    In a step without gradients, which is not trained, it sets rate and scheduler to nonsense.
    """

    def __init__(self, late: bool, of: type[torch.optim.Optimizer]) -> None:
        super().__init__(late)
        self.of, self.rates = of, list[float]()

    def configure_optimizers(self) -> Any:
        optimizer = self.of(self.parameters(), lr=0.1)  # type: ignore[call-arg]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_fit_start(self) -> None:
        self.of_fit = torch.tensor(0.5)

    def on_train_start(self) -> None:
        self.norm = sum(float(parameter.detach().norm()) for parameter in self.parameters())
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


class Makes(Callback):
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.of_callback = 1.5  # type: ignore[assignment]


def scaled(strategy: MakeStrategy | None, late: bool, of: type[torch.optim.Optimizer], batch: int = 8) -> Any:
    module = Scaled(late, of)
    trainer(made(strategy), max_epochs=2, callbacks=[Makes()]).fit(module, data(batch))
    return module.rates, weights(module)


@sampled(
    1,
    ("layout", "late", "of"),
    [
        ("pipeline of 4 microbatches", True, torch.optim.Adagrad),  # has states when it is made
        ("pipeline of 4 microbatches", False, torch.optim.SGD),
        ("pipeline x zero 2", False, torch.optim.Adagrad),
    ],
)
def test_steps_see_attributes_optimizers_and_schedulers(layout: str, late: bool, of: Any) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    expected = begun_on_one(scaled, None, late, of)
    found = run_on_ranks(ranks, scaled, strategy, late, of, 8 // readers)
    require_like([expected.result()] * ranks, found)


class Early(Handwritten):
    """Reads what comes into being after a sanity check, or a checkpoint."""

    def on_train_start(self) -> None:
        self.scale = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss([batch[0] * self.scale, *batch[1:]])


class SavesFirst(Callback):
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "first.ckpt")


def early() -> list[str]:
    said = []
    for options in ({}, {"num_sanity_val_steps": 0, "callbacks": [SavesFirst()]}):
        run = trainer(PipelineParallelStrategy(2, microbatches=2), max_epochs=1, **options)
        with pytest.raises(Exception, match="has no attribute 'scale'") as caught:
            run.fit(Early(), data(), data())
        said.append("\n".join(getattr(caught.value, "__notes__", ())))
    return said


def test_attributes_that_are_not_there_yet_are_named() -> None:
    for checked, saved in run_on_ranks(2, early):
        assert re.search(r"before the first batch.*Trainer\(num_sanity_val_steps=0\) runs none then", checked), checked
        assert "a checkpoint is saved before that batch; save after" in saved


class Validated(Handwritten):
    """Notes samples and draws; its start hook may draw, or seed, after the sanity check and before data shuffles."""

    def __init__(self, hook: str) -> None:
        super().__init__(late=True)
        self.hook, self.seen = hook, list[float]()

    def on_train_start(self) -> None:
        if self.hook == "draws":
            torch.rand(3)
        elif self.hook == "seeds":
            torch.manual_seed(11)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += [*batch[0][:, 0].tolist(), float(torch.rand(()))]


def orders(strategy: MakeStrategy | None) -> list[list[float]]:
    """Of late models with and without a sanity check and a generator of the loader's; and weights of no run."""
    found = []
    cases = ("", 0, False), ("", 0, True), ("", 1, False), ("draws", 1, False), ("seeds", 1, False)
    for hook, checks, own_generator in cases:
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(1) if own_generator else None
        train = DataLoader(points(16, seed=1), batch_size=4, shuffle=True, generator=generator)
        module = Validated(hook)
        val = DataLoader(points(8, seed=2), 4)
        trainer(made(strategy), max_epochs=2, num_sanity_val_steps=checks).fit(module, train, val)
        found.append(module.seen)
    trainer(made(strategy), max_steps=0).fit(module := Validated(""), train, val)
    return [*found, [float(value.sum()) for value in module.state_dict().values()]]


def test_order_and_draws_of_data_are_those_of_one_device() -> None:
    expected = begun_on_one(orders, None)
    assert run_on_ranks(2, orders, PIPELINE) == [expected.result()] * 2
