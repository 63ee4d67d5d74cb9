"""`self.log` and torchmetrics give the values of one device, in every step and epoch, without `sync_dist`."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

from lightning_parallel import (
    DataParallelStrategy,
    ZeroStrategy,
)
from tests.layouts import layouts
from tests.models import Plain, loaders
from tests.ranks import RanksFailed, begun_on_one, run_on_ranks
from tests.strategies.one_and_two import made
from tests.strategies.runs import loader, on_device, on_ranks
from tests.tiers import covering, sampled
from tests.trainers import trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*(No (positive|negative) samples|before the ..update)")
REDUCTIONS = ["mean", "sum", "min", "max", torch.mean, sum]


class Spread(CatMetric):
    """A metric of everything it has seen."""

    def compute(self) -> Tensor:
        values = super().compute()
        return values.sort().values.diff().square().sum() + values.numel()


class Talkative(LightningModule):
    """Logs in every way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        kinds = {"mean": MeanMetric, "sum": SumMetric, "min": MinMetric, "max": MaxMetric, "spread": Spread}
        kinds["mean_of_losses"] = MeanMetric
        self.stages = nn.ModuleDict({stage: self.metrics(kinds) for stage in ("train_", "val", "test")})
        self.returned = BinaryAccuracy()

    def metrics(self, kinds: dict[str, Any]) -> nn.ModuleDict:
        together = MetricCollection({"acc": BinaryAccuracy(), "auroc": BinaryAUROC()})
        return nn.ModuleDict({**{name: kind() for name, kind in kinds.items()}, "together": together})

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).squeeze(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.talk("train_", batch, batch_idx)
        self.log("only_epoch", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.talk("val", batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.talk("test", batch, batch_idx)

    def talk(self, stage: str, batch: Any, batch_idx: int) -> Tensor:
        numbers, features, targets = batch
        guesses = self(features)
        error = (guesses - targets).square()
        loss = error.mean()
        reduced = [loss, error.sum(), error.min(), error.max(), error.mean(), error.sum()]
        for number, (reduction, value) in enumerate(zip(REDUCTIONS, reduced, strict=True)):
            self.log(f"r{number}", value, on_step=True, on_epoch=True, reduce_fx=reduction, batch_size=len(numbers))
        self.log("plain", loss, prog_bar=True)
        self.log_dict({"one": loss, "two": 2 * loss}, on_step=True, on_epoch=False)
        if batch_idx % 2 == 0:
            self.log("sometimes", error.sum(), on_step=True, on_epoch=False, reduce_fx="sum")
        self.log("mine", float(self.global_rank == 0), rank_zero_only=True)
        self.talk_of_metrics(self.stages[stage], error, guesses, targets)
        self.log("returned", self.returned(guesses.sigmoid(), (targets > 0).int()), on_step=True, on_epoch=True)
        return loss

    def talk_of_metrics(self, metrics: nn.ModuleDict, error: Tensor, guesses: Tensor, targets: Tensor) -> None:
        labels = (targets > 0).int()
        metrics["mean"](error)
        metrics["mean_of_losses"](error.mean(), weight=len(error))
        metrics["sum"](error)
        metrics["min"].update(error)
        metrics["max"].update(error)
        metrics["spread"](error)
        metrics["together"](guesses.sigmoid(), labels)
        self.log("m_mean", metrics["mean"], on_step=True, on_epoch=True)
        self.log("m_mean_of_losses", metrics["mean_of_losses"], on_step=True, on_epoch=True)
        self.log("m_sum", metrics["sum"], on_step=False, on_epoch=True)
        self.log_dict({"m_min": metrics["min"], "m_max": metrics["max"]}, on_step=False, on_epoch=True)
        self.log("m_spread", metrics["spread"], on_step=True, on_epoch=True)
        self.log_dict(metrics["together"], on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("train_hook", 2.5 + self.current_epoch)

    def on_validation_epoch_end(self) -> None:
        self.log("val_hook", self.stages["val"]["sum"].compute())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("batch_hook", float(len(batch[0])), on_step=True, on_epoch=True, reduce_fx="sum")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Listener(Callback):
    """Notes everything that loggers, callbacks and the progress bar get to see."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, float]]] = []

    def note(self, event: str, metrics: dict[str, Any]) -> None:
        rank_specific = ("mine",)
        found = {name: float(value) for name, value in metrics.items() if not name.startswith(rank_specific)}
        self.heard.append((event, found))

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.note("bar", trainer.progress_bar_metrics)
        self.note("logged", trainer.logged_metrics)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.note("step", trainer.callback_metrics)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.note("validation step", trainer.logged_metrics)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.note("validation", trainer.callback_metrics)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self.note("epoch", trainer.callback_metrics)

    def on_fit_end(self, trainer: Trainer, *_: Any) -> None:
        self.note("end", trainer.callback_metrics)


def talk(strategy: Any, batch_size: int, size: int, val_sizes: tuple[int, ...]) -> Any:
    seed_everything(5, verbose=False)
    module, listener = Talkative(), Listener()
    used = trainer(strategy, callbacks=[listener], max_epochs=2)
    used.fit(module, loader(size, batch_size, shuffle=True), [loader(val_size, batch_size) for val_size in val_sizes])
    tested = used.test(module, loader(val_sizes[0], batch_size), verbose=False)
    validated = used.validate(module, [loader(val_size, batch_size) for val_size in val_sizes], verbose=False)
    return listener.heard, [plain(metrics) for metrics in tested + validated]


def plain(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("mine")}


@sampled(
    1,
    ("strategy", "n", "size", "val_sizes"),
    [
        (DataParallelStrategy, 2, 11, (5,)),
        (DataParallelStrategy, 4, 9, (1, 6)),
        (partial(ZeroStrategy, stage=2), 2, 8, (4, 3)),
        (partial(ZeroStrategy, stage=3), 2, 9, (5, 2)),
    ],
    ids=["dp-2", "dp-4", "zero-2", "zero-3"],
)
def test_every_value_is_that_of_one_device(strategy, n, size, val_sizes):
    heard, results = on_device(talk, 2 * n, size, val_sizes)
    for ours, our_results in on_ranks(n, talk, strategy, 2, size, val_sizes):
        for (event, wanted), (_, found) in zip(heard, ours, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6), event
        for wanted, found in zip(results, our_results, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


class OnlyHere(Talkative):
    """Logs what other ranks do not."""

    def __init__(self, stage: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.stage, self.options = stage, options

    def talk(self, stage: str, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 1 and stage == self.stage:
            self.log("spike", 1.0, **self.options)
        return super().talk(stage, batch, batch_idx)


def talk_on_one_rank(stage: str, options: dict[str, Any]) -> None:
    module = OnlyHere(stage, options)
    trainer(DataParallelStrategy(), max_epochs=1).fit(module, loader(12, 2), loader(12, 2))


@pytest.mark.filterwarnings("ignore")
@covering(keep=1, stage=["train_", "val"], options=[{}, {"on_step": True, "reduce_fx": "max"}])
def test_what_only_one_rank_logs_is_an_error_on_all(stage, options):
    with pytest.raises(RanksFailed, match=r"ranks 0, 1 failed(.|\n)*what is logged must be the same on every rank"):
        run_on_ranks(2, talk_on_one_rank, stage, options)


class ReadsOnRankZero(Callback):
    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self.read(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self.read(trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.read(trainer)

    def read(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            assert "plain" in trainer.callback_metrics or trainer.sanity_checking
            assert trainer.logged_metrics
            next(iter(trainer.val_dataloaders))
            next(iter(trainer.train_dataloader or [None]))


class LogsAtTheEnd(Callback):
    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.log("of_callback", float(module.global_rank))

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.log("of_callback_too", float(module.global_rank))


def read_on_rank_zero(strategy: Any) -> None:
    module = Talkative()
    used = trainer(strategy, callbacks=[LogsAtTheEnd(), ReadsOnRankZero()], max_epochs=2, num_sanity_val_steps=2)
    used.fit(module, loader(9, 2, shuffle=True), loader(5, 2))
    assert used.callback_metrics["of_callback"] == used.callback_metrics["of_callback_too"] == 0.5
    gathered = used.strategy.all_gather(torch.tensor(float(used.global_rank)))
    assert gathered.tolist() == [0.0, 1.0]


@pytest.mark.filterwarnings("ignore")
def test_what_only_rank_zero_reads_waits_for_nobody():
    run_on_ranks(2, read_on_rank_zero, DataParallelStrategy())


class Reducing(Plain):
    """Logs means, counts and extremes, each under the reduction by which the parts of a batch are combined."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.reduce(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.reduce(batch, batch_idx)

    def reduce(self, batch: Any, batch_idx: int) -> Tensor:
        logits, errors = self.score(batch)
        loss = nn.functional.cross_entropy(logits, batch[1]) + errors.square().mean()
        hits = (logits.argmax(-1) == batch[1]).sum()
        values = {
            "mean": {"loss": loss, "squares": errors.square().mean().item(), "share": hits.item() / len(logits)},
            "sum": {"hits": hits.float(), "hits_item": hits.item(), "samples": float(len(logits))},
            "max": {
                "largest": errors.abs().max(),
                "largest_item": errors.abs().max().item(),
                "largest_of_numpy": torch.tensor(errors.detach().numpy().max()),
            },
            "min": {"smallest": errors.abs().min()},
        }
        for how, some in values.items():
            for name, value in some.items():
                self.log(f"{how}_of_{name}", value, reduce_fx=how, on_step=True, on_epoch=True)
                self.log(f"epoch_{how}_of_{name}", value, reduce_fx=how, on_step=False, on_epoch=True)
                if batch_idx:
                    self.log(f"later_{how}_of_{name}", value, reduce_fx=how, on_step=False, on_epoch=True)
        few = errors[:2].mean()  # of so many samples on each rank and in each microbatch
        self.log("few", few, batch_size=2, on_step=True, on_epoch=True)
        return loss


def reducing(strategy: Any, batch_size: int, samples: int = 20, val_samples: int = 12) -> Any:
    torch.manual_seed(0)
    module, listener = Reducing(partial(torch.optim.SGD, lr=0.1), blocks=2), Listener()
    used = trainer(made(strategy), callbacks=[listener], max_epochs=2)
    used.fit(module, *loaders("plain", batch_size, samples=samples, val_samples=val_samples))
    return listener.heard


TO_REDUCE = layouts(
    *("data parallel", "zero 3", "pipeline", "data parallel of 4", "tensor x data parallel", "pipeline x zero 2")
)


@sampled(2, ("n", "readers", "strategy"), TO_REDUCE.values(), ids=[*TO_REDUCE])
def test_reductions_are_those_of_full_batches(n: int, readers: int, strategy: Any) -> None:
    require_reduced(n, readers, strategy)


@pytest.mark.parametrize("sizes", [(16, 10), (10, 16)], ids=["validating", "training"])
def test_reductions_with_microbatches_of_one_sample(sizes: tuple[int, int]) -> None:
    require_reduced(*TO_REDUCE["pipeline"], *sizes)


def require_reduced(n: int, readers: int, strategy: Any, *sizes: int) -> None:
    expected = begun_on_one(reducing, None, 8, *sizes)
    for found in run_on_ranks(n, reducing, strategy, 8 // readers, *sizes):
        for (event, wanted), (_, got) in zip(expected.result(), found, strict=True):
            few = [name for name in wanted if name.startswith("few")]
            assert {**got, **{name: wanted[name] for name in few}} == pytest.approx(wanted, rel=1e-4, abs=1e-5), event


class Counts(Plain):
    """Logs counts and a maximum by the default reduction, in every way in which it may be written."""

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        self.scored = torch.compile(self.score, backend="eager") if compiled else self.score
        self.best = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, _ = self.scored(batch)
        hits = (logits.argmax(-1) == batch[1]).float()
        self.best = max(self.best, hits.mean().item())
        values = {"tensor": hits.sum(), "item": hits.sum().item(), "numpy": float(hits.detach().numpy().sum())}
        values["late"] = hits.mean() if batch_idx < 2 else hits.sum()  # a mean first, and a sum later
        self.log_dict({**values, "best": self.best})
        self.log("weighed", hits[0], batch_size=int(hits.sum()) + 1)
        self.seen.append([hits.sum().item(), hits.mean().item(), self.best, hits[0].item()])
        return nn.functional.cross_entropy(logits, batch[1])

    def on_fit_start(self) -> None:
        self.seen: list[list[float]] = []
        self.shown: list[dict[str, float]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.shown.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


def counted(compiled: bool) -> Any:
    torch.manual_seed(0)
    module = Counts(compiled)
    trainer(DataParallelStrategy(), max_epochs=1).fit(module, *loaders("plain", 4, samples=32, val_samples=8))
    return module.seen, module.shown


@pytest.mark.parametrize("compiled", [False, True])
def test_mean_is_that_of_ranks_however_a_value_was_made(compiled: bool) -> None:
    (one, shown), (other, also_shown) = run_on_ranks(2, counted, compiled)
    assert shown == also_shown
    for batch_idx, (mine, theirs, found) in enumerate(zip(one, other, shown, strict=True)):
        hits, rate, best, _ = [(a + b) / 2 for a, b in zip(mine, theirs, strict=True)]
        assert {found[name] for name in ("tensor", "item", "numpy")} == {hits}
        assert found["late"] == pytest.approx(rate if batch_idx < 2 else hits)
        assert found["best"] == pytest.approx(best)
        weights = mine[0] + 1, theirs[0] + 1
        assert found["weighed"] == pytest.approx((mine[3] * weights[0] + theirs[3] * weights[1]) / sum(weights))


class NewName(Plain):
    """Logs a count under a name that comes up after the first batch, and for a second loader."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log(f"samples_{dataloader_idx}", len(batch[0]), reduce_fx="sum", add_dataloader_idx=False)
        if batch_idx:
            self.log(f"later_{dataloader_idx}", len(batch[0]), reduce_fx="sum", add_dataloader_idx=False)


def named() -> dict[str, float]:
    run, (_, val) = trainer(DataParallelStrategy()), loaders("plain", 4, samples=8, val_samples=24)
    run.validate(NewName(), [val, val], verbose=False)
    return {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.filterwarnings("ignore:.*needs to be floating")
def test_sum_under_a_new_name_is_that_of_all_ranks() -> None:
    for found in run_on_ranks(2, named):
        assert found == {"samples_0": 24, "samples_1": 24, "later_0": 16, "later_1": 16}
