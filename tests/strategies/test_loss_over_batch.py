"""Losses that compare samples of a batch, in a pipeline: refused, or computed once for all microbatches."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    DataParallel,
    HybridStrategy,
    ParallelPlan,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallel,
    Zero,
)
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import SCHEDULES
from tests.ranks import on_one, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, made
from tests.tiers import covering, sampled
from tests.trainers import trainer

WIDTH, LENGTH = 6, 5


class Block(nn.Module):
    """Tells what it finds in all samples beside its result, if asked."""

    def __init__(self, tells: bool = False) -> None:
        super().__init__()
        self.tells = tells
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Any, told: Tensor | None = None) -> Any:
        x = x + self.inner(x).tanh()
        if not self.tells:
            return x
        mean = x.flatten(0, 1).softmax(-1).mean(0)
        return x, mean if told is None else told + mean


class Compares(LightningModule):
    """Embeds tokens, runs blocks and a head; what it computes of their results is up to those that inherit."""

    tells = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(self.tells) for _ in range(4))
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


class Tells(Compares):
    """Its blocks tell means over all samples, which the loss multiplies."""

    tells = True

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x, told = self.stem(x), None
        for block in self.blocks:
            x, told = block(x, told)
        assert told is not None
        return self.head(x).square().mean() + (told * told.detach().sqrt()).sum()


class Masks(Compares):
    """A mean over what a mask of its own leaves: asked for, not found."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        each = (self.head(self.body(x)) - x).square().mean(-1)
        return (each * y).sum() / y.sum()


class Bends(Compares):
    """Compares means of features, and takes a spread over the batch: neither is a sum over samples."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.head(self.body(x)).mean(1)
        spread = (1 - hidden.var(0)).relu().sum()
        return F.mse_loss(hidden.mean(0), x.mean((0, 1))) + spread + hidden.square().mean().sqrt()


class Sums(Compares):
    """A loss of twice as many samples is twice as large."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.body(x)), x, reduction="sum")


MODELS: dict[str, type[Compares]] = {
    each.__name__: each for each in (Contrasts, Balances, Normalises, Hooked, Masks, Bends, Sums)
}


def data(samples: int, batch: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.randint(0, 3, (samples, LENGTH), generator=generator)), batch)


def trained(model: str, strategy: MakeStrategy | None, batch: int = 8) -> dict[str, Any]:
    module = MODELS[model]()
    loader = data(27, batch)  # the last batch has three samples, fewer than microbatches
    run = trainer(made(strategy), max_epochs=2, precision="64-true", limit_val_batches=2)
    run.fit(module, loader, loader)
    return {"losses": module.losses, "metrics": dict(run.callback_metrics), "weights": module.state_dict()}


def require_equal(model: str, ranks: int, strategy: Callable[[], Any], batch: int = 8) -> None:
    expected = on_one(trained, model, None)
    for found in run_on_ranks(ranks, trained, model, strategy, batch):
        for what, values in expected.items():
            if what == "losses" and batch < 8:
                continue  # of this rank's samples
            torch.testing.assert_close(found[what], values, rtol=1e-9, atol=1e-9)


def pipeline(schedule: str, **options: Any) -> Any:
    return partial(PipelineParallelStrategy, 2, schedule=schedule, microbatches=4, loss_over="batch", **options)


@covering(keep=1, model=MODELS, schedule=SCHEDULES)
def test_a_loss_over_all_microbatches_is_that_of_one_process(model: str, schedule: str) -> None:
    require_equal(model, 2, pipeline(schedule))


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


MODELS["Named"] = Named
PP2 = PipelineParallel(2, microbatches=2, loss_over="batch")


@covering(
    layout=([DataParallel(2), PP2], [Zero(2, stage=2), PP2], [Zero(2), PP2], [DataParallel(2), PP2, TensorParallel(2)])
)
def test_samples_of_ranks_meet_too(layout: list[Any]) -> None:
    require_equal("Named", 8 if len(layout) > 2 else 4, partial(HybridStrategy, *layout), batch=4)


# ---------------------------------------------------------------- refused


class InBlocks(Named):
    def body(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) + self.compare(x.mean(1), x.mean(1))
        return x


class TwoViews(Contrasts):
    """Two views of each sample run together, those of all samples one after the other."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = self.body(torch.cat([x, x.flip(1) + 1])).mean(1).chunk(2)
        return F.cross_entropy(one @ other.t(), torch.arange(len(x)))


MODELS |= {"InBlocks": InBlocks, "TwoViews": TwoViews, "TimeFirst": TimeFirst, "Tells": Tells}


class PerSample(Compares):
    """An L1 loss whose mean is written as a norm."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.head(self.body(x))
        return torch.linalg.vector_norm(hidden, ord=1) / hidden.numel()


MODELS["PerSample"] = PerSample


def refusal(model: str, strategy: MakeStrategy) -> str:
    """The error by which a run is refused; nothing for one that trains."""
    try:
        trained(model, strategy)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


NUMBERS = r"the loss of (\d) samples is (-?[\d.e+]+), but those of \d and \d of them together make (-?[\d.e+]+)"
MEASURED = NUMBERS + r": samples interact, .*loss_over='batch'.*microbatches=1.*loss_over='microbatches'"
IN_BLOCKS = NUMBERS + r": though what follows the blocks ran once .*microbatches=1.*loss_over='microbatches'"


@sampled(
    4,
    ("model", "options", "expected"),
    [
        ("Contrasts", {}, MEASURED),
        ("PerSample", {}, "^$"),
        ("Normalises", {}, MEASURED),
        ("Balances", {}, MEASURED),
        ("Bends", {}, MEASURED),
        ("Sums", {}, MEASURED),
        ("Balances", {"loss_over": "microbatches"}, "^$"),
        ("Named", {}, r"whole_batch=\('compare',\)\) names compare, .*loss_over='batch'"),
        ("InBlocks", {"loss_over": "batch"}, IN_BLOCKS),
        ("TwoViews", {"loss_over": "batch"}, IN_BLOCKS),
        ("TimeFirst", {"loss_over": "batch"}, r"blocks\.3, .* shape \(5, 2, 6\) for 2 samples that differs"),
        ("Tells", {"loss_over": "batch"}, r"blocks\.3, .* differs between microbatches|together make"),
    ],
)
def test_what_a_pipeline_refuses_in_the_first_batch(model: str, options: dict[str, Any], expected: str) -> None:
    """On every rank; a mean over samples trains, however it is written."""
    for said in run_on_ranks(2, refusal, model, partial(PipelineParallelStrategy, 2, microbatches=4, **options)):
        assert re.search(expected, said), said


def test_mean_over_samples_written_as_a_norm() -> None:
    require_equal("PerSample", 2, partial(PipelineParallelStrategy, 2, microbatches=4))


class TwoMeans(LightningModule):
    """Two heads with targets of their own, and a penalty: which of them count is up to `parts`."""

    def __init__(self, parts: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = parts
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, targets = batch
        for layer in self.layers:
            x = x + layer(x)
        first, second = (F.cross_entropy(head(x), targets[:, k]) for k, head in enumerate(self.heads))
        penalty = x.square().mean()
        sums = {"two": first + second, "beside": first + 0.1 * penalty, "faintly": first + 1e-4 * penalty}
        return sums.get(self.parts, 2 * first)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def two_means(strategy: MakeStrategy | None, parts: str, ignored: range) -> dict[str, Tensor] | str:
    generator, model = torch.Generator().manual_seed(1), TwoMeans(parts)
    targets = torch.randint(3, (24, 2), generator=generator)
    missing = torch.rand(24, 2, generator=generator) < 0.4
    targets[ignored] = targets.masked_fill(missing, -100)[ignored]
    data = TensorDataset(torch.randn(24, WIDTH, generator=generator).double(), targets)
    try:
        trainer(made(strategy), max_epochs=1, precision="64-true").fit(model, DataLoader(data, 8))
    except (ValueError, RuntimeError) as error:
        return f"{error} in batch {model.trainer.global_step}"
    return dict(model.state_dict())


@covering(
    keep=2,
    parts=["two", "one", "beside", "faintly"],
    ignored=[range(24), range(0), range(16, 24)],
    over=["auto", "microbatches", "batch"],
)
def test_means_over_other_targets_are_exact_or_refused(parts: str, ignored: range, over: Any) -> None:
    """In the first batch in which their shares are unlike."""
    expected, mixes = on_one(two_means, None, parts, ignored), len(ignored) > 0 and parts != "one"
    for found in run_on_ranks(
        2, two_means, partial(PipelineParallelStrategy, 2, microbatches=4, loss_over=over), parts, ignored
    ):
        if mixes and over == "auto":
            assert re.search(f"together make .* in batch {ignored[0] // 8}$", found), found
            continue
        exact = [torch.allclose(found[name], each, rtol=0, atol=1e-9) for name, each in expected.items()]
        assert all(exact) == (not mixes or over == "batch")
