"""Steps that change the model around their forward, and put it back where earlier stages of a pipeline do not come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.layouts import layouts
from tests.models import PlainBlock, points
from tests.ranks import RanksFailed, run_on_ranks
from tests.strategies.one_and_two import assert_like_one_device, made
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
PIPELINES = layouts(
    *("pipeline", "zbv", "pipeline over the batch", "pipeline x zero 2", "pipeline x zero 3", "pipeline x tensor")
)


def trained(strategy: Any, act: str, batch_size: int) -> Any:
    module = Model(act)
    run = trainer(made(strategy), max_epochs=2, num_sanity_val_steps=0)
    run.fit(module, DataLoader(points(24, seed=1), batch_size), DataLoader(points(16, seed=2), batch_size))
    found = module.losses, float(run.callback_metrics["val_loss"]), [m.training for m in module.modules()]
    return *found, {name: value.clone() for name, value in module.state_dict().items()}


@covering(keep=1, act=[act.__name__ for act in KEPT], layout=PIPELINES)
def test_what_a_step_puts_back_or_leaves_is_as_on_one_device(act: str, layout: str) -> None:
    ranks, readers, strategy = PIPELINES[layout]
    assert_like_one_device(trained, ranks, (None, act, 8), (strategy, act, 8 // readers))


def test_head_that_changes_after_the_loss_over_the_batch() -> None:
    assert_like_one_device(
        trained, 2, (None, "head_after", 8), (PIPELINES["pipeline over the batch"].strategy, "head_after", 8)
    )


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
