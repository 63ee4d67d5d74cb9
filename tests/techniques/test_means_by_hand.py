"""Means that a step makes by hand, of a sum or of what a mask selects: over all that share a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    ContextParallel,
    DataParallel,
    DataParallelStrategy,
    HybridStrategy,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallel,
    ZeroStrategy,
)
from lightning_parallel.strategies.logged.sums import BatchSums
from lightning_parallel.techniques.tools import means as means_module
from lightning_parallel.techniques.tools.losses import METHODS, unwatch_methods
from lightning_parallel.techniques.tools.means import Means
from tests.heard import heard
from tests.ranks import begun_on_one, run_on_ranks
from tests.tiers import covering, sampled
from tests.trainers import trainer

VOCABULARY, LENGTH, WIDTH = 11, 8, 8


# -------------------------------------------------------------------- what counts as a mean


def test_a_sum_that_is_divided_counts_by_what_divides_it() -> None:
    losses, mask = torch.rand(6, requires_grad=True), torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    logits, none = torch.randn(6, 5, requires_grad=True), torch.zeros(6)
    with Means() as means:
        made = [
            (losses * mask).sum() / mask.sum(),
            (losses * mask).sum() / mask.sum().clamp(min=1),
            torch.div((losses * mask).sum(), torch.clamp_min(mask.sum(), 1)),
            torch.dot(losses, mask).div(mask.sum()),
            torch.einsum("i,i->", losses, mask) / mask.sum(),
            (2 * (losses * mask).sum() + losses[mask > 0].sum()) / mask.sum(),
            (losses * mask).sum() / max(mask.sum().item(), 1),
            F.cross_entropy(logits, torch.zeros(6).long(), reduction="sum", label_smoothing=0.1) / torch.tensor(6),
            (losses * mask).mean() / mask.mean(),
            losses.masked_fill(mask == 0, torch.nan).nanmean(),
        ]
        empty = [(losses * none).sum() / none.sum(), (losses * none).sum() / none.sum().clamp(min=1)]
    assert [float(mean.over.count) for mean in means.all] == [3, 3, 3, 3, 3, 3, 3, 6, 3, 3, 0, 0]
    assert [float(each.detach()) for each in empty] == [0, 0]  # and not 0 / 0, for other parts may have some
    torch.testing.assert_close(made[0], losses[mask > 0].mean())


def test_a_mean_of_what_a_mask_selects_counts_as_much_as_it_selects() -> None:
    logits, mask = torch.randn(6, 5, requires_grad=True), torch.tensor([1, 1, 0, 1, 0, 0]).bool()
    with Means(elements=False) as means:
        logits[mask].mean()
        (logits[mask].sigmoid() - 1).square().mean()
        F.mse_loss(logits[mask], torch.zeros(3, 5))
        F.cross_entropy(logits[mask], torch.zeros(3).long(), reduction="none").mean()
        torch.masked_select(logits, mask[:, None]).mean()
        F.margin_ranking_loss(logits[mask], torch.zeros(3, 5), torch.ones(3, 5))
        F.triplet_margin_loss(logits[mask], torch.zeros(3, 5), torch.ones(3, 5))
        F.multi_margin_loss(logits[mask], torch.zeros(3).long())
        logits.index_select(0, mask.nonzero().squeeze(1)).mean()
        torch.cat([logits[mask], logits[:1][~mask[:1]]]).mean()
        assert logits[~mask & mask].mean() == 0
    assert [float(mean.over.count) for mean in means.all] == [15, 15, 15, 3, 15, 15, 3, 3, 15, 15, 0]


def test_in_a_pipeline_they_count_where_the_loss_is_made_of_them_alone() -> None:
    x, mask = torch.rand(6, requires_grad=True), torch.tensor([1, 1, 0, 1, 0, 0])
    with Means(elements=False) as means:
        first = (x * mask).sum() / mask.sum().clamp(min=100)
        both = torch.stack([first, x[mask > 0].mean()]).mean()
    means.rest_within(first + x.sum(), together=True)
    assert means.over is None
    means.rest_within(2 * first, together=True)
    assert means.over is not None
    assert [float(each) for each in means.over] == [3, 100, 100]
    means.rest_within(both, together=True)
    assert [float(each) for each in means.over] == [103, 103, 0]  # no floor is that of both


def test_the_tensors_of_a_batch_are_walked_over_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(8, 4, 5), torch.randint(5, (8, 4))
    with Means(batch=(x, y)) as means:
        for sample, target in zip(x, y, strict=True):
            F.cross_entropy(sample, target)
    walks, tensors_in = [], means_module._tensors_in
    monkeypatch.setattr(means_module, "_tensors_in", lambda *given: walks.append(given[0]) or tensors_in(*given))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    BatchSums([], means, 1.0, dist.group.WORLD)
    dist.destroy_process_group()
    assert len([each for each in walks if each is means.batch]) == 1


def test_without_means_nobody_walks_over_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(means_module, "multiples_in", lambda *given: asked.append(given) or {})
    Means().rest_within(torch.ones(2, requires_grad=True).sum(), together=True)
    assert not asked


def test_other_quotients_and_means_are_left_alone() -> None:
    x, weight = torch.rand(6, requires_grad=True), torch.rand((), requires_grad=True)
    with Means() as means:
        mean = x.sum() / torch.tensor(6)
        mean / torch.tensor(2.0)  # of a mean that counts already
        torch.stack([mean, mean * 2]).mean() / torch.tensor(2.0)
        torch.stack([mean, x.mean()]).mean() / torch.tensor(2.0)
        (mean + x).mean() / torch.tensor(2.0)
        torch.stack([mean, x.mean()]).nanmean()
        torch.cat([mean.view(1), x[x > 0.5]]).mean()
        (mean + 1).exp() / torch.tensor(2.0)
        x.max() / torch.tensor(2.0)
        x.sum() / weight
        x / x.detach().sum()
        x.detach().sum() / torch.tensor(6)
        x.mean()
    assert len(means.all) == 1
    with Means(elements=False) as parts:
        x.sum() / 6  # any constant, which would count for all that a part of a pipeline computes
    assert not parts.all


# -------------------------------------------------------------------- whole curves


AVERAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "floored": lambda losses, mask: (losses * mask).sum() / mask.sum().clamp(min=4),
    # of all losses, also where no sample has any
    "positives": lambda losses, mask: losses.sum() / torch.clamp_min(mask.sum(), 1),
    "selected": lambda losses, mask: losses[mask > 0].mean(),
    "inside": lambda losses, mask: losses.sum() / torch.tensor(losses.numel()),
    "number": lambda losses, mask: (losses * mask).sum() / mask.sum().item(),
    "number alone": lambda losses, mask: (losses * mask).sum() / mask.sum().item(),
    "ratio": lambda losses, mask: (losses * mask).mean() / mask.mean(),
    "numbers": lambda losses, mask: torch.nanmean(losses.masked_fill(mask == 0, torch.nan)),
    "positions": lambda losses, mask: losses.flatten().index_select(0, mask.flatten().nonzero().squeeze(1)).mean(),
    "joined": lambda losses, mask: torch.cat([each[kept > 0] for each, kept in zip(losses, mask, strict=True)]).mean(),
    "reciprocal": lambda losses, mask: (losses * mask).sum() * (1.0 / mask.sum()),
    "shares": lambda losses, mask: (losses * (mask / mask.sum())).sum(),
    "torch.mean": lambda losses, mask: torch.mean(losses[mask > 0]),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class ByHand(LightningModule):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.automatic_optimization = way, way != "manual"
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def loss(self, tokens: Tensor, target: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        weight = self.head.weight
        if self.way == "inside":  # a quotient of the model's own
            weight = weight / (weight.abs().sum() / torch.tensor(weight.numel()))
        logits, counted = F.linear(hidden, weight, self.head.bias), target != 0
        losses, mask = F.cross_entropy(logits.transpose(1, 2), target, reduction="none"), counted.to(logits.dtype)
        match self.way:
            case "summed":
                summed = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")
                return summed / counted.sum()
            case "logits":
                return F.mse_loss(logits[counted].tanh(), torch.ones(int(counted.sum()), VOCABULARY).to(logits))
            case "beside":  # a loss function's mean
                mean = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=0)
                return mean + 0.5 * (logits.square().sum(-1) * mask).sum() / mask.sum()
            case way if way in BESIDE:
                other = BESIDE[way](self, logits, target)
                own = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=0)
                return (own if way.startswith("ignored") else self.mean(losses, mask)) + 0.1 * other
            case _:
                return self.mean(losses, mask)

    def mean(self, losses: Tensor, mask: Tensor) -> Tensor:
        return AVERAGES.get(self.way, lambda losses, mask: (losses * mask).sum() / mask.sum())(losses, mask)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(*batch)
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


Other = Callable[[ByHand, Tensor, Tensor], Tensor]
BESIDE: dict[str, Other] = {
    "penalised": lambda model, logits, target: logits.logsumexp(-1).square().mean(),
    "ignored": lambda model, logits, target: logits.logsumexp(-1).square().mean(),
    "number": lambda model, logits, target: logits.logsumexp(-1).square().mean(),
    "decayed": lambda model, logits, target: model.head.weight.square().sum(),
    "ignored, decayed": lambda model, logits, target: model.head.weight.square().sum(),
    "two": lambda model, logits, target: model.mean(logits.square().sum(-1), (target > 3).to(logits)),
}
"""Parts of a loss that do not count as the mean does beside which they are."""
TOGETHER = ["penalised", "decayed", "two", "ignored", "ignored, decayed"]


class Losses(Callback):
    def __init__(self) -> None:
        self.all: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.all.append(float(trainer.callback_metrics["loss"]))


def padded(readers: int, empty: bool = False) -> DataLoader[Any]:
    """Batches of 8 samples, the last of 6; one sample in four has no target, and perhaps none of the second batch."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (22, LENGTH), generator=random)
    without = torch.rand(22, LENGTH, generator=random) < 0.6
    without[::4] = True
    without[8:16] |= empty
    return DataLoader(TensorDataset(tokens, tokens.masked_fill(without, 0)), 8 // readers)


def curve(way: str, strategy: Callable[[], Any], readers: int) -> list[float]:
    seen = Losses()
    data = padded(readers, empty=way in ("floored", "positives"))
    trainer(strategy(), precision="64-true", max_epochs=2, callbacks=[seen]).fit(ByHand(way), data)
    return seen.all


class Evaluated(ByHand):
    """Logs means by hand, and what looks like one."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        tokens, target = batch
        hits, mask, weight = tokens == target, target != 0, (tokens + 1).double()
        self.log("loss", self.loss(*batch))
        self.log("accuracy", hits.sum() / mask.sum())  # 0 / 0 where a rank has no target
        self.log("of each", hits[:, 0].double().sum() / torch.tensor(len(hits)))
        self.log("weighted", (weight * mask).sum() / weight.sum().clamp(min=1), on_step=True)
        self.log("half", mask.double().mean() / torch.tensor(2.0))


def evaluated(strategy: Callable[[], Any], readers: int) -> Any:
    return trainer(strategy(), precision="64-true").validate(Evaluated("masked"), padded(readers), verbose=False)[0]


LAYOUTS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "data parallel": (DataParallelStrategy, 2, 2),
    "zero 2": (partial(ZeroStrategy, stage=2), 2, 2),
    "zero 3": (ZeroStrategy, 4, 4),  # with two samples a batch, of which a rank may have no target at all
    "pipeline": (partial(PipelineParallelStrategy, microbatches=4), 2, 1),
    "pipelines of replicas": (lambda: HybridStrategy(PipelineParallel(2, microbatches=2), DataParallel(2)), 4, 2),
    "layers of replicas": (lambda: HybridStrategy(PipelineParallel(2, microbatches=1), DataParallel(2)), 4, 2),
    "tensors of replicas": (lambda: HybridStrategy(TensorParallel(2), DataParallel(2)), 4, 2),
    "sequences of replicas": (lambda: HybridStrategy(ContextParallel(2), DataParallel(2)), 4, 2),
}
WAYS = ["floored", "masked", "positives", "summed", "selected", "logits", "beside", "inside", "ratio", "numbers",
        "positions", "joined"]  # fmt: skip


@covering(keep=1, layout=LAYOUTS, way=[*WAYS, *TOGETHER])
def test_means_by_hand_train_as_on_one_device(layout: str, way: str) -> None:
    check(layout, way)


@covering(
    keep=1,
    layout=["pipeline", "pipelines of replicas", "layers of replicas"],
    way=[*TOGETHER, "number", "number alone"],
)
def test_beside_other_parts_of_a_loss_they_train_as_on_one_device(layout: str, way: str) -> None:
    check(layout, way)


@pytest.mark.parametrize("way", ["reciprocal", "shares", "torch.mean"])
def test_a_pipeline_computes_what_it_does_not_know_once_for_the_batch(way: str) -> None:
    check("pipeline", way)


@pytest.mark.parametrize(("way", "said"), [("shares", "divided by their sum"), ("torch.mean", "torch.mean, or a mean")])
def test_ranks_tell_of_means_that_count_by_samples(way: str, said: str) -> None:
    first, second = run_on_ranks(2, told, way)
    assert [message for message in first if said in message]
    assert not second


def told(way: str) -> list[str]:
    with heard() as lines:
        curve(way, DataParallelStrategy, 2)
    return [line for line in lines if "counts by samples" in line]


def test_means_by_hand_of_manual_optimization_train_as_on_one_device() -> None:
    check("zero 2", "manual")


def check(layout: str, way: str) -> None:
    strategy, ranks, readers = LAYOUTS[layout]
    begun = begun_on_one(curve, way, HybridStrategy, 1)
    for losses in run_on_ranks(ranks, curve, way, strategy, readers):
        assert losses == pytest.approx(begun.result(), rel=1e-9)


@sampled(1, "layout", ["zero 3", "sequences of replicas"])
def test_means_by_hand_in_evaluations_are_those_of_one_device(layout: str) -> None:
    strategy, ranks, readers = LAYOUTS[layout]
    begun = begun_on_one(evaluated, HybridStrategy, 1)
    for values in run_on_ranks(ranks, evaluated, strategy, readers):
        assert values == pytest.approx(begun.result(), rel=1e-9)


def methods_after_a_run() -> bool:
    unwatch_methods()
    before = {name: vars(Tensor).get(name) for name in METHODS}
    curve("masked", DataParallelStrategy, 2)
    return {name: vars(Tensor).get(name) for name in METHODS} == before


def test_tensors_have_their_own_methods_after_a_run() -> None:
    assert all(run_on_ranks(2, methods_after_a_run))
