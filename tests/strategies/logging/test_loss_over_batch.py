"""Losses that compare samples of a batch, in a pipeline: refused, or computed once for all microbatches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    DataParallel,
    ParallelPlan,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallel,
    Zero,
)
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import SCHEDULES
from tests.layouts import Layout, hybrid
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, made
from tests.tiers import sampled
from tests.trainers import trainer

WIDTH, LENGTH = 6, 5
PIPELINE = partial(PipelineParallelStrategy, 2, microbatches=4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Compares(LightningModule):
    """Embeds tokens, runs blocks and a head; what it computes of their results is up to those that inherit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.losses: list[float] = []

    def body(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


class Contrasts(Compares):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = self.body(x).mean(1), self.head(x.mean(1))
        return F.cross_entropy(one @ other.t(), torch.arange(len(x)))


class Balances(Compares):
    """A product of means, of probabilities in which each token counts by a weight."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        chances = self.head(self.body(x)).flatten(0, 1).softmax(-1)
        weight = y.float().flatten().unsqueeze(1).to(chances)
        chosen = F.one_hot(chances.argmax(-1), WIDTH).to(chances)
        unequal = ((chosen * weight).mean(0) * (chances * weight).mean(0)).sum()
        self.log("unequal", unequal)
        return chances.square().mean() + unequal


class Normalises(Compares):
    """Keeps running statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.norm(self.body(x).mean(1))) - x.mean(1)).square().mean()


class Hooked(Balances):
    """Collects what its blocks find by hooks, each sample's tokens one after the other, as routers' logits are."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        found: list[Tensor] = []
        hooks = [
            block.inner.register_forward_hook(lambda _, __, out: found.append(out.flatten(0, -2)))
            for block in self.blocks
        ]
        loss = super().loss(x, y)
        for hook in hooks:
            hook.remove()
        chances = torch.stack(found).softmax(-1)
        weight = y.float().flatten().unsqueeze(1).to(chances)
        return loss + ((chances > 0.2).to(chances) * weight).mean((0, 1)) @ chances.mean((0, 1))


class TimeFirst(Compares):
    """Its samples are the second dimension of what blocks return."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.body(x.transpose(0, 1)).mean(0)
        return F.cross_entropy(hidden @ self.head(x.mean(1)).t(), torch.arange(len(x)))


class Sums(Compares):
    """A loss of twice as many samples is twice as large."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.body(x)), x, reduction="sum")


OVER_BATCH = [Contrasts, Balances, Normalises, Sums]


def data(samples: int, batch: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.randint(0, 3, (samples, LENGTH), generator=generator)), batch)


def trained(kind: type[Compares], strategy: MakeStrategy | None, batch: int = 8) -> dict[str, Any]:
    module = kind()
    loader = data(27, batch)  # the last batch has three samples, fewer than microbatches
    run = trainer(made(strategy), max_epochs=2, precision="64-true", limit_val_batches=2)
    run.fit(module, loader, loader)
    return {"losses": module.losses, "metrics": dict(run.callback_metrics), "weights": module.state_dict()}


def each_trained(kinds: Sequence[type[Compares]], strategy: MakeStrategy, batch: int) -> list[Any]:
    return [trained(kind, strategy, batch) for kind in kinds]


def check(kinds: Sequence[type[Compares]], layout: Layout) -> None:
    ranks, readers, strategy = layout
    begun = [begun_on_one(trained, kind, None) for kind in kinds]
    for found in run_on_ranks(ranks, each_trained, kinds, strategy, 8 // readers):
        for expected, got in zip(begun, found, strict=True):
            for what, values in expected.result().items():
                if what != "losses" or readers == 1:  # else of this rank's samples
                    torch.testing.assert_close(got[what], values, rtol=1e-9, atol=1e-9)


@sampled(1, "schedule", [*SCHEDULES][::-1])
def test_losses_over_all_microbatches(schedule: str) -> None:
    check(OVER_BATCH, Layout(2, 1, partial(PIPELINE, schedule=schedule, loss_over="batch")))


# ---------------------------------------------------------------- beside other techniques


class Named(Compares):
    """Its comparison is a module that the plan names: it sees the samples of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.compare = Comparison()

    def parallel_plan(self) -> ParallelPlan:
        styles = {"blocks.*.inner.0": "colwise", "blocks.*.inner.2": "rowwise"}
        return ParallelPlan(blocks="blocks.*", styles=styles, whole_batch="compare")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.body(x)
        compared: Tensor = self.compare(hidden.mean(1), self.head(x.mean(1)))
        ignored = y.masked_fill(y == 0, -100)  # ranks have different numbers of targets
        over_targets = F.cross_entropy(self.head(hidden).flatten(0, 1), ignored.flatten())
        self.log("compared", compared)
        return compared + over_targets if self.training else over_targets


class Comparison(nn.Module):
    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return F.cross_entropy(one @ other.t(), torch.arange(len(one)))


PP2 = PipelineParallel(2, microbatches=2, loss_over="batch")
OVER_RANKS = {
    "zero 3": Layout(4, 2, hybrid(Zero(2), PP2)),
    "data x tensor": Layout(8, 2, hybrid(DataParallel(2), PP2, TensorParallel(2))),
    "zero 2": Layout(4, 2, hybrid(Zero(2, stage=2), PP2)),
}


@sampled(1, "layout", OVER_RANKS)
def test_samples_of_ranks_meet_too(layout: str) -> None:
    check([Named], OVER_RANKS[layout])


# ---------------------------------------------------------------- refused


class InBlocks(Named):
    def body(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) + self.compare(x.mean(1), x.mean(1))
        return x


class PerSample(Compares):
    """An L1 loss whose mean is written as a norm."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.head(self.body(x))
        return torch.linalg.vector_norm(hidden, ord=1) / hidden.numel()


NUMBERS = r"the loss of (\d) samples is (-?[\d.e+]+), but those of \d and \d of them together make (-?[\d.e+]+)"
MEASURED = NUMBERS + r": samples interact, .*loss_over='batch'.*microbatches=1.*loss_over='microbatches'"
IN_BLOCKS = NUMBERS + r": the code after the blocks ran once .*microbatches=1.*loss_over='microbatches'"
IGNORED = range(24), range(16, 24), range(0)  # samples that lack some targets
REFUSED: list[tuple[Any, str, str]] = [
    (Contrasts, "auto", MEASURED),
    *((kind, "auto", MEASURED) for kind in (Normalises, Balances, Sums)),
    (Named, "auto", r"whole_batch=\('compare',\)\) names compare, .*loss_over='batch'"),
    (InBlocks, "batch", IN_BLOCKS),
    (TimeFirst, "batch", r"blocks\.3, .* shape \(5, 2, 6\) for 2 samples and differs"),
    (Hooked, "batch", r"made in block blocks\.0 is used after the blocks, .*return it from its module"),
    (PerSample, "auto", "^$"),
    (Balances, "microbatches", "^$"),
    *((("two", ignored), "auto", f"together make .* in batch {ignored[0] // 8}$") for ignored in IGNORED[:2]),
    *(((parts, IGNORED[0]), "auto", "together make .* in batch 0$") for parts in ("beside", "faintly")),
    (("faintly", IGNORED[1]), "auto", "together make .* in batch 2$"),
]


def refusal(case: Any, strategy: MakeStrategy) -> str:
    """The error by which a run is refused; nothing for one that trains."""
    if isinstance(case, tuple):
        return str(two_means(strategy, *case))
    try:
        trained(case, strategy)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@sampled(3, ("case", "over", "message"), REFUSED)
def test_losses_that_the_first_batch_refuses(case: Any, over: Any, message: str) -> None:
    """Of microbatches with unlike targets, the first batch that has such; a mean over samples trains."""
    for said in run_on_ranks(2, refusal, case, partial(PIPELINE, loss_over=over)):
        assert re.search(message, said), said


class TwoMeans(Compares):
    """Two heads with targets of their own, and a penalty: which of them count is up to `parts`."""

    def __init__(self, parts: str) -> None:
        super().__init__()
        self.parts, self.other = parts, nn.Linear(WIDTH, WIDTH)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.body(x)
        first, second = (F.cross_entropy(head(x), y[:, k]) for k, head in enumerate((self.head, self.other)))
        penalty = x.square().mean()
        sums = {"two": first + second, "beside": first + 0.1 * penalty, "faintly": first + 1e-4 * penalty}
        return sums.get(self.parts, 2 * first)


def two_means(strategy: MakeStrategy | None, parts: str, ignored: range) -> dict[str, Tensor] | str:
    generator, model = torch.Generator().manual_seed(1), TwoMeans(parts)
    targets = torch.randint(3, (24, 2), generator=generator)
    missing = torch.rand(24, 2, generator=generator) < 0.4
    targets[ignored] = targets.masked_fill(missing, -100)[ignored]
    loader = DataLoader(TensorDataset(torch.randn(24, WIDTH, generator=generator).double(), targets), 8)
    try:
        trainer(made(strategy), max_epochs=1, precision="64-true", limit_val_batches=0).fit(model, loader, loader)
    except (ValueError, RuntimeError) as error:
        return f"{error} in batch {model.trainer.global_step}"
    return dict(model.state_dict())


CASES = [(parts, ignored) for parts in ("two", "one", "beside", "faintly") for ignored in IGNORED]


def each_of_two_means(strategy: MakeStrategy, cases: Sequence[Any]) -> list[Any]:
    return [two_means(strategy, *case) for case in cases]


@sampled(1, "over", ["batch", "microbatches", "auto"])
def test_means_over_other_targets_are_exact(over: Any) -> None:
    """Unless `microbatches` is asked for; `auto` refuses what mixes."""
    mixes = [parts != "one" and len(ignored) > 0 for parts, ignored in CASES]
    cases = [case for case, mixed in zip(CASES, mixes, strict=True) if not (mixed and over == "auto")]
    begun = [begun_on_one(two_means, None, *case) for case in cases]
    for results in run_on_ranks(2, each_of_two_means, partial(PIPELINE, loss_over=over), cases):
        for (parts, ignored), expected, found in zip(cases, begun, results, strict=True):
            exact = [torch.allclose(found[name], each, rtol=0, atol=1e-9) for name, each in expected.result().items()]
            assert all(exact) == (over != "microbatches" or parts == "one" or len(ignored) == 0)
