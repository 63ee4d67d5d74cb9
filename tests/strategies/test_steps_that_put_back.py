"""Steps that change the model around their forward, and put it back where earlier stages of a pipeline do not come."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import HybridStrategy, PipelineParallel, PipelineParallelStrategy, TensorParallel, Zero
from tests.models import PlainBlock, points
from tests.ranks import RanksFailed, begun_on_one, run_on_ranks
from tests.strategies.one_and_two import made, require_like
from tests.tiers import covering
from tests.trainers import trainer


class Block(PlainBlock):
    """Computes otherwise while it does not train."""

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return super().forward(x) * (scale if self.training else 0.5 * scale)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(13, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block(8, 12) for _ in range(4))
        self.scale, self.between = 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if self.between:
                block.up.weight.data.clamp_(-0.1, 0.1)
            x = block(x, self.scale)
        return self.head(x)  # type: ignore[no-any-return]


class Model(LightningModule):
    """Does what `act` does around the forward: it gets the module and the number of the batch, and may yield once."""

    def __init__(self, act: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.act, self.losses = Net(), ACTS[act], list[float]()

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch[0]).squeeze(-1), batch[2])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        around = self.act(self, batch_idx)
        next(around)
        loss = self.loss(batch)
        next(around, None)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        around = iter([None]) if self.act in IN_TRAINING else self.act(self, batch_idx)
        next(around)
        loss = self.loss(batch)
        next(around, None)
        self.log("val_loss", loss)

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.3)


# ---------------------------------------------------------------- what steps do


def mode(module: Any, batch_idx: int) -> Any:
    module.net.blocks.train(batch_idx % 2 == 0)
    yield
    module.net.blocks.train(module.training)


def mode_stays(module: Any, batch_idx: int) -> Any:
    if batch_idx == 1:
        module.net.blocks[0].eval()
    yield
    if batch_idx == 2:
        module.net.blocks.train()


def flag(module: Any, batch_idx: int) -> Any:
    module.net.scale *= 1 + 0.1 * batch_idx
    yield
    module.net.scale = 1.0


def flag_stays(module: Any, batch_idx: int) -> Any:
    module.net.scale = 1 + 0.1 * batch_idx
    yield


def frozen(module: Any, batch_idx: int) -> Any:
    module.net.requires_grad_(batch_idx != 1)
    module.net.head.requires_grad_(True)
    yield
    module.net.requires_grad_(True)


def frozen_block(module: Any, batch_idx: int) -> Any:
    module.net.blocks[0].requires_grad_(False)
    yield
    module.net.blocks[0].requires_grad_(True)


def stays_frozen(module: Any, batch_idx: int) -> Any:
    module.net.blocks[0].requires_grad_(False)
    yield


def clamped(module: Any, batch_idx: int) -> Any:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.2, 0.2)
    yield


def between(module: Any, batch_idx: int) -> Any:
    module.net.between = True
    yield


def head_after(module: Any, batch_idx: int) -> Any:
    yield
    module.net.head.weight.data.clamp_(-0.1, 0.1)


def stem_around(module: Any, batch_idx: int) -> Any:
    module.net.stem.weight.data.clamp_(-0.1, 0.1)
    yield


def frozen_early(module: Any, batch_idx: int) -> Any:
    blocks = module.net.blocks[:2].requires_grad_(False)
    yield
    blocks.requires_grad_(True)


IN_TRAINING = (
    flag,
    frozen,
    frozen_block,
    frozen_early,
    stays_frozen,
    between,
    head_after,
    clamped,
    stem_around,
    mode_stays,
)


def noise(module: Any, batch_idx: int) -> Any:
    kept = [parameter.detach().clone() for parameter in module.net.blocks.parameters()]
    for parameter in module.net.blocks.parameters():
        parameter.data.mul_(1.05)
    yield
    for parameter, value in zip(module.net.blocks.parameters(), kept, strict=True):
        parameter.data.copy_(value)


def noise_in_early_blocks(module: Any, batch_idx: int) -> Any:
    parameters = list(module.net.blocks[:2].parameters())
    kept = [parameter.detach().clone() for parameter in parameters]
    torch._foreach_mul_([parameter.data for parameter in parameters], 1.05) if parameters else None
    yield
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.data = value


@torch.no_grad()
def swapped(module: Any, batch_idx: int) -> Any:
    if not module.training:
        module.net.load_state_dict({name: 0.9 * value for name, value in module.net.state_dict().items()})
    yield
    if not module.training:
        module.net.load_state_dict({name: value / 0.9 for name, value in module.net.state_dict().items()})


def clamped_after(module: Any, batch_idx: int) -> Any:
    yield
    for parameter in module.parameters():
        parameter.data.clamp_(-0.2, 0.2)


KEPT = mode, flag, flag_stays, frozen, frozen_block, frozen_early, clamped, between, stem_around
REFUSED = noise, noise_in_early_blocks, swapped, clamped_after, mode_stays, stays_frozen
ACTS: dict[str, Callable[[Any, int], Any]] = {act.__name__: act for act in (*KEPT, *REFUSED, head_after)}
PIPELINES: dict[str, tuple[int, int, Callable[[], Any]]] = {
    "1f1b": (2, 1, partial(PipelineParallelStrategy, 2, microbatches=2)),
    "zbv": (2, 1, partial(PipelineParallelStrategy, 2, schedule="zbv", microbatches=4)),
    "over the batch": (2, 1, partial(PipelineParallelStrategy, 2, microbatches=2, loss_over="batch")),
    "zero 2": (4, 2, lambda: HybridStrategy(PipelineParallel(2, microbatches=2), Zero(2, stage=2))),
    "zero 3": (4, 2, lambda: HybridStrategy(PipelineParallel(2, microbatches=2), Zero(2))),
    "tensor parallel": (4, 1, lambda: HybridStrategy(PipelineParallel(2, microbatches=2), TensorParallel(2))),
}


def trained(strategy: Any, act: str, batch_size: int) -> Any:
    module = Model(act)
    run = trainer(made(strategy), max_epochs=2, num_sanity_val_steps=0)
    run.fit(module, DataLoader(points(24, seed=1), batch_size), DataLoader(points(16, seed=2), batch_size))
    found = module.losses, float(run.callback_metrics["val_loss"]), [m.training for m in module.modules()]
    return *found, {name: value.clone() for name, value in module.state_dict().items()}


@covering(keep=1, act=[act.__name__ for act in KEPT], layout=PIPELINES)
def test_what_a_step_puts_back_or_leaves_is_as_on_one_device(act: str, layout: str) -> None:
    ranks, readers, strategy = PIPELINES[layout]
    expected = begun_on_one(trained, None, act, 8)
    for found in run_on_ranks(ranks, trained, strategy, act, 8 // readers):
        require_like(expected.result(), found)


def test_so_is_a_head_that_changes_when_the_loss_of_the_batch_is_known() -> None:
    expected = begun_on_one(trained, None, "head_after", 8)
    for found in run_on_ranks(2, trained, PIPELINES["over the batch"][2], "head_after", 8):
        require_like(expected.result(), found)


SAYS = (
    r"is written into a tensor of this stage|"
    r"(net\.blocks|modes or requires_grad).* changed in a step, .* do it in hooks, as on_train_batch_start"
)


@covering(keep=2, act=[act.__name__ for act in REFUSED], layout=PIPELINES)
def test_what_earlier_stages_would_miss_is_refused(act: str, layout: str) -> None:
    refused(act, layout)


def refused(act: str, layout: str) -> None:
    ranks, readers, strategy = PIPELINES[layout]
    with pytest.raises(RanksFailed, match=SAYS):
        run_on_ranks(ranks, trained, strategy, act, 8 // readers, timeout=15.0)
