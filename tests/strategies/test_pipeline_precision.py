"""Low precision in a pipeline, losses that overflow, and those that are no number."""

import math
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from tests.curves import check_parity
from tests.models import PlainBlock, loaders
from tests.ranks import ranks, run_on_ranks
from tests.strategies.one_and_two import PIPELINE, ZBV, MakeStrategy
from tests.tiers import covering, sampled
from tests.trainers import trainer


class Poisoned(LightningModule):
    """In its second batch the gradients of what the first block holds overflow, and of nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(PlainBlock(13, 17) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, *_ = batch
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 0 and batch_idx == 1:
                x = Overflow.apply(x)
        return x.float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Tensor:
        return incoming * math.inf


class Watch(Callback):
    """The scale, and whether this rank's parameters moved, after every step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, bool]] = []
        self.before: list[Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.before = [parameter.detach().clone() for parameter in module.parameters()]

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        same = all(torch.equal(*pair) for pair in zip(self.before, module.parameters(), strict=True))
        self.seen.append((trainer.precision_plugin.scaler.get_scale(), not same))


def overflow(strategy: MakeStrategy, clip: float | None) -> list[tuple[float, bool]]:
    watch = Watch()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100))
    run = trainer(strategy(), plugins=[plugin], callbacks=[watch], max_steps=3, gradient_clip_val=clip)
    run.fit(Poisoned(), loaders("plain", 8).train)
    return watch.seen


@covering(keep=1, strategy=(PIPELINE, ZBV), clip=(None, 0.5))
def test_an_overflow_on_one_stage_skips_the_step_on_all(strategy: MakeStrategy, clip: float | None) -> None:
    for seen in run_on_ranks(2, overflow, strategy, clip):
        assert seen == [(2.0**10, True), (2.0**9, False), (2.0**9, True)]


@sampled(1, ("precision", "rtol"), [("bf16-mixed", 2e-2), ("bf16-true", 5e-2)])
def test_precisions(precision: str, rtol: float) -> None:
    sgd = partial(torch.optim.SGD, lr=0.05)
    run = {"precision": precision, "max_epochs": 1, "data": {"samples": 24, "val_samples": 8}}
    check_parity("llama", 2, PIPELINE, rtol=rtol, model={"optimizer": sgd}, **run)


@ranks(2)
def test_loss_that_is_no_number_is_so_on_every_rank() -> None:
    class Broken(Poisoned):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, 0)
            self.log("loss", loss * (math.nan if batch_idx == 1 else 1.0))
            return loss

    stopping = EarlyStopping("loss", patience=100, check_finite=True, check_on_train_epoch_end=True)
    run = trainer(PIPELINE(), max_epochs=5, callbacks=[stopping], limit_train_batches=2)
    run.fit(Broken(), loaders("plain", 8).train)
    assert run.current_epoch == 1
