"""Pipelines beside data parallel: gradients reduced within the forward are those that backward would have reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import DataParallel, HybridStrategy, PipelineParallel, TensorParallel, Zero
from lightning_parallel.techniques.gradients.buckets import BucketedStep
from lightning_parallel.techniques.technique import Technique
from tests.curves import Curve, compare_weights, curve
from tests.models import Loaders, PlainBlock
from tests.ranks import RanksFailed, on_one, run_on_ranks
from tests.tiers import covering, sampled
from tests.trainers import trainer

BATCHES, BATCH, WORDS = 4, 8, 16


class Sometimes(PlainBlock):
    """A block with a parameter that only samples with a large first value use."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.rare = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        large = x[:, :1, :1] > 1.5
        return torch.where(large, x * self.rare, x) if large.any() else x


class Words(LightningModule):
    """A language model with padded targets and a head, which may be tied."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(Sometimes(8, 16) for _ in range(4))
        self.head = nn.Linear(8, WORDS)
        if tied:
            self.head.weight = self.embedding.weight
        self.double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.embedding(batch[0])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten(), ignore_index=0)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.1)


class Weighs(Words):
    """Multiplies the loss by what may differ between ranks, after the step."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss * loss.detach(), *args, **kwargs)


class Adds(Words):
    """Sets gradients to zero in every other step only."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class Keeps(Words):
    """Sets gradients to zero in place."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class Halves(Words):
    """Has a hook on the gradient of a parameter, on every rank that keeps it."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0:
            self.blocks[0].norm.weight.register_post_accumulate_grad_hook(_nothing)
            for parameter in self.blocks[1].parameters():  # one of which is not used by all batches
                parameter.register_hook(lambda gradient: gradient * 0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class NoNumber(Words):
    """A loss that is not finite where the first of the data ranks reads, and whose gradients are."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        first = (batch[0] == FIRST).all(dim=1).any()
        return super().training_step(batch, batch_idx) + torch.where(first, torch.nan, 0.0)


class Scales(Precision):
    """Multiplies losses by what differs between ranks."""

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        return super().pre_backward(tensor, module) * (1.0 + module.global_rank)


class Looks(Callback):
    """Reads gradients of the batch before where Lightning still shows them, and leaves their sums with the losses."""

    def on_before_zero_grad(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        self.seen = sum(float(gradient.double().square().sum()) for gradient in found)
        self.all = [*vars(self).get("all", []), self.seen]


def _nothing(parameter: Tensor) -> None:
    """A hook that only looks."""


def data(batch: int) -> DataLoader:
    drawn = torch.randint(0, WORDS, (2, BATCHES * BATCH, 6), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(*drawn), batch)


FIRST = data(1).dataset.tensors[0][0]


def fit(kind: Callable[[], LightningModule], make: Callable[[], Strategy] | None, **run: Any) -> tuple[Curve, int]:
    with counting() as taken:
        options = {"max_epochs": 2, "callbacks": [], **run}
        callbacks = options.pop("callbacks")

        def made(callbacks_: list[Callback] = callbacks, **more: Any) -> Trainer:
            own = more.pop("callbacks")
            return trainer(make() if make else "auto", callbacks=[*callbacks_, *own], **options, **more)

        return curve(made, kind(), Loaders(data(BATCH // 2 if make else BATCH), None)), len(taken)


@contextmanager
def counting() -> Iterator[list[nn.Parameter]]:
    taken, take = [], BucketedStep.take

    def noting(self: BucketedStep, parameter: nn.Parameter, gradient: Tensor) -> None:
        taken.append(parameter)
        take(self, parameter, gradient)

    with mock.patch.object(BucketedStep, "take", noting):
        yield taken


def layout(technique: Technique, schedule: str = "1f1b", *more: Technique) -> HybridStrategy:
    return HybridStrategy(PipelineParallel(2, microbatches=4, schedule=schedule), technique, *more)


def check(kind: Callable[[], LightningModule], make: Callable[[], Strategy], ranks: int = 4, **run: Any) -> list[int]:
    """Holds all ranks to one process, and returns how many gradients each reduced early."""
    expected, _ = on_one(fit, kind, None, **run)
    results = run_on_ranks(ranks, fit, kind, make, **run)
    for rank, (got, _) in enumerate(results):
        compare_weights(expected.weights, got.weights, 1e-9, f"rank {rank}: ")
    return [taken for _, taken in results]


AVERAGES = {"dp": DataParallel(2), "zero1": Zero(2, stage=1), "zero2": Zero(2, stage=2)}
KINDS = {
    "tied": Words,
    "apart": partial(Words, tied=False),
    "adds": Adds,
    "keeps": Keeps,
}
SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]


@covering(keep=1, technique=AVERAGES, kind=KINDS, schedule=SCHEDULES)
def test_what_is_reduced_early_is_exact(technique: str, kind: str, schedule: str) -> None:
    assert all(check(KINDS[kind], partial(layout, AVERAGES[technique], schedule)))


@pytest.mark.exhaustive
def test_gradients_of_divided_parameters_too() -> None:
    assert all(check(Words, partial(layout, DataParallel(2), "1f1b", TensorParallel(2)), ranks=8))


def test_small_buckets_and_those_that_compress() -> None:
    assert all(check(Words, partial(layout, DataParallel(2, bucket_mb=1e-4))))


@sampled(1, "kind", [Weighs, Halves], ids=["factor", "hook"])
def test_what_may_differ_between_ranks_is_reduced_in_backward(kind: Any) -> None:
    make = partial(layout, DataParallel(2))
    if kind is Weighs:
        assert not any(taken for _, taken in run_on_ranks(4, fit, kind, make))
    else:
        taken = check(kind, make)
        assert len(set(taken)) == 1 or min(taken) < max(taken)  # ranks of the hook's stage take none


def looks(make: Callable[[], Strategy] | None) -> list[float]:
    looking = Looks()
    fit(Words, make, callbacks=[looking])
    return looking.all


def test_gradients_of_the_batch_before_stay_until_they_are_set_to_zero() -> None:
    (expected,) = run_on_ranks(1, looks, None)
    first, second, *_ = run_on_ranks(4, looks, partial(layout, DataParallel(2)))
    assert [bool(value) for value in expected] == [False] + [True] * (2 * BATCHES - 1)
    assert first == second


def test_accumulated_gradients_are_reduced_in_backward() -> None:
    assert not any(check(Words, partial(layout, Zero(2, stage=1)), accumulate_grad_batches=2))


def test_a_loss_that_is_not_finite_stops_all_ranks() -> None:
    with pytest.raises(RanksFailed) as raised:
        run_on_ranks(4, fit, NoNumber, partial(layout, DataParallel(2)))
    assert "ranks 0, 1, 2, 3 failed" in str(raised.value)
    assert "FloatingPointError" in str(raised.value)


def test_factors_that_differ_between_ranks_are_refused_on_all() -> None:
    with pytest.raises(RanksFailed) as raised:
        run_on_ranks(4, fit, Words, partial(layout, DataParallel(2)), plugins=[Scales()])
    assert str(raised.value).count("multiply it in training_step, or override") == 4
