"""Buffers that several stages of a pipeline use: trained as on one device, or refused before the first step."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.further.points import WIDTH, Handwritten
from tests.models import PlainBlock, points
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import PIPELINE, ZBV, MakeStrategy, assert_like_one_device, made, require_like
from tests.tiers import sampled
from tests.trainers import trainer


class Rotation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cosines", torch.linspace(0, 1, WIDTH).cos())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.cosines


class Replaces(Rotation):
    def forward(self, x: Tensor) -> Tensor:
        self.cosines = self.cosines * 1.0
        return super().forward(x)


class Tabled(PlainBlock):
    """Has tables of its own, and a module with a buffer that all blocks have."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__(WIDTH, 13)
        self.shared = shared
        self.register_buffer("table", torch.linspace(1, 2, WIDTH))
        self.register_buffer("unread", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.shared(x))


class Shares(Handwritten):
    """All blocks have one module with a buffer."""

    shared: type[nn.Module] = Rotation

    def make_blocks(self) -> nn.Module:
        shared = self.shared()
        return nn.ModuleList(Tabled(shared) for _ in range(self.count))


class ReadsBuffersOfBlocks(Shares):
    """The code between blocks reads buffers of blocks before and behind it, by views, early and by asking for them."""

    def make(self) -> None:
        super().make()
        self.head.register_buffer("scale", torch.linspace(2, 3, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        early = self.blocks[0].table * 2
        x = x * self.head.scale * self.blocks[3].table[0].item()
        for number, block in enumerate(self.blocks):
            x = block(x * self.blocks[(number + 2) % 4].table[None].data)
        return x * early + float(self.blocks[1].table.tolist()[1])


class SharesStatistics(Shares):
    shared = partial(nn.BatchNorm1d, WIDTH)  # type: ignore[assignment]


class SharesReplaced(Shares):
    shared = Replaces


class ReadLater(Shares):
    """An evaluation reads a buffer of another stage's block, training does not."""

    def make(self) -> None:
        super().make()
        self.blocks[0].register_buffer("mask", torch.ones(512, 512))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) * self.blocks[0].mask.sum())


class Counting(PlainBlock):
    def __init__(self, counted: list[nn.Module]) -> None:
        super().__init__(WIDTH, 13)
        self.counted = counted

    def forward(self, x: Tensor) -> Tensor:
        self.counted[0].calls.fill_(3.0)  # type: ignore[operator]
        return super().forward(x)


class ChangedByBlocks(Handwritten):
    """The blocks change a buffer of the module's."""

    def make_blocks(self) -> nn.Module:
        self.register_buffer("calls", torch.zeros(()))
        return nn.ModuleList(Counting([self]) for _ in range(self.count))


def fitted(strategy: MakeStrategy | None, make: Any) -> tuple[list[float], dict[str, Tensor]]:
    module, losses = make(), list[float]()
    module.on_train_batch_end = lambda *_: losses.append(float(module.trainer.callback_metrics["train_loss"]))
    data = DataLoader(points(32, seed=1), 8)
    trainer(made(strategy), max_epochs=1).fit(module, data, data)
    return losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (Shares, PIPELINE),
        pytest.param(ReadsBuffersOfBlocks, PIPELINE, marks=pytest.mark.exhaustive),
        pytest.param(ReadsBuffersOfBlocks, ZBV, marks=pytest.mark.exhaustive),
    ],
    ids=["shares", "reads, 1f1b", "reads, zbv"],
)
def test_stages_that_read_a_buffer_have_it(make: type[Shares], strategy: MakeStrategy) -> None:
    assert_like_one_device(fitted, 2, (None, make), (strategy, make))


REFUSED = {
    SharesStatistics: r"buffer blocks\.\d\.shared\.(running_mean|num_batches_tracked) is changed .* \[0, 1\] have it",
    SharesReplaced: r"the buffer blocks\.\d\.shared\.cosines is changed in block .* stages \[0, 1\] have it",
    ChangedByBlocks: r"the buffer calls is changed in block .*, on stage 0, .* register it on the one module",
    ReadLater: r"blocks\.0\.mask is read, but another stage .* use it at the same places",
}


def errors_of() -> list[str]:
    said = []
    for make in REFUSED:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            fitted(PIPELINE, make)
        said.append(str(caught.value))
    return said


def test_buffers_of_several_stages_that_are_refused() -> None:
    for said in run_on_ranks(2, errors_of):
        for message, words in zip(said, REFUSED.values(), strict=True):
            assert re.search(words, message), message


class Centered(nn.Module):
    """Has no parameters, and goes on counting."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.center.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x


class ChangesItsOwn(Handwritten):
    """The step reads its own buffers before the blocks, and changes them before and after these, or puts in others."""

    def make(self) -> None:
        super().make()
        self.centered = Centered()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("first", torch.zeros(WIDTH))
        self.register_buffer("given", torch.zeros(13))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("samples", torch.tensor(0))
        self.register_buffer("rate", torch.tensor(1.0))

    def body(self, x: Tensor) -> Tensor:
        if self.training:
            self.rate = self.rate * 0.9
            self.first.lerp_(x.detach().mean(0), 0.1)
        y = super().body((x + self.mean + self.centered.center) * self.rate)
        if self.training:
            self.mean = self.mean * 0.9 + y.detach().mean(0) * 0.1
        return self.centered(y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step((batch[0] + self.given, *batch[1:]), batch_idx)
        self.given.mul_(0.5).add_(batch[0].mean(0))
        self.steps += 1
        self.samples += len(batch[0])
        return loss


@pytest.mark.filterwarnings("ignore:The step computes with buffers that it changes")
@sampled(1, "strategy", [PIPELINE, ZBV], ids=["1f1b", "zbv"])
def test_buffers_of_the_module_itself_change_once_a_batch(strategy: MakeStrategy) -> None:
    over_batch = partial(strategy, loss_over="batch")
    assert_like_one_device(fitted, 2, (None, ChangesItsOwn), (over_batch, ChangesItsOwn))


class Watches(Handwritten):
    """Has running statistics of its inputs, beside a buffer that stays."""

    def make(self) -> None:
        super().make()
        self.seen = nn.BatchNorm1d(WIDTH, affine=False)
        self.seen.register_buffer("table", torch.linspace(0, 1, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen(x.detach())
        return super().body(x)


def statistics(strategy: MakeStrategy | None) -> dict[str, Tensor]:
    _, state = fitted(strategy, Watches)
    return {name: value for name, value in state.items() if name.startswith("seen.")}


def test_running_statistics_of_the_module_itself() -> None:
    expected = begun_on_one(statistics, None)
    for found in run_on_ranks(2, statistics, PIPELINE):
        assert 0.5 < found.pop("seen.running_var").mean() < 1  # those of microbatches, as was told
        require_like({name: value for name, value in expected.result().items() if name in found}, found)
