"""`self.log` and torchmetrics give the values of one device, in every step and epoch, without `sync_dist`."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

from lightning_parallel import DataParallelStrategy, ZeroStrategy
from tests.layouts import layouts
from tests.models import Plain, loaders
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import made
from tests.strategies.runs import loader, on_device, on_ranks
from tests.tiers import sampled
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
        self.stages = nn.ModuleDict({stage: self.metrics() for stage in ("train_", "val", "test")})
        self.returned = BinaryAccuracy()

    def metrics(self) -> nn.ModuleDict:
        kinds = {"mean": MeanMetric, "sum": SumMetric, "min": MinMetric, "max": MaxMetric, "spread": Spread}
        together = MetricCollection({"acc": BinaryAccuracy(), "auroc": BinaryAUROC()})
        made = {name: kind() for name, kind in kinds.items()}
        return nn.ModuleDict({**made, "mean_of_losses": MeanMetric(), "together": together})

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
        guesses, labels = self.layer(features).squeeze(-1), (targets > 0).int()
        error = (guesses - targets).square()
        loss, always = error.mean(), {"on_step": True, "on_epoch": True}
        reduced = [loss, error.sum(), error.min(), error.max(), error.mean(), error.sum()]
        for number, (reduction, value) in enumerate(zip(REDUCTIONS, reduced, strict=True)):
            self.log(f"r{number}", value, reduce_fx=reduction, batch_size=len(numbers), **always)
        self.log("plain", loss, prog_bar=True)
        self.log_dict({"one": loss, "two": 2 * loss}, on_step=True, on_epoch=False)
        if batch_idx % 2 == 0:
            self.log("sometimes", error.sum(), on_step=True, on_epoch=False, reduce_fx="sum")
        self.log("mine", float(self.global_rank == 0), rank_zero_only=True)
        metrics = self.stages[stage]
        for name in "mean", "sum", "spread":
            metrics[name](error)
        metrics["mean_of_losses"](loss, weight=len(error))
        metrics["min"].update(error)
        metrics["max"].update(error)
        metrics["together"](guesses.sigmoid(), labels)
        for name in "mean", "mean_of_losses", "spread":
            self.log(f"m_{name}", metrics[name], **always)
        self.log_dict({f"m_{name}": metrics[name] for name in ("sum", "min", "max")}, on_step=False, on_epoch=True)
        self.log_dict(metrics["together"], **always)
        self.log("returned", self.returned(guesses.sigmoid(), labels), **always)
        return loss

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
        """But for what is this rank's."""
        found = {name: float(value) for name, value in metrics.items() if not name.startswith("mine")}
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
    used, val = trainer(strategy, callbacks=[listener], max_epochs=2), [loader(each, batch_size) for each in val_sizes]
    used.fit(module, loader(size, batch_size, shuffle=True), val)
    for metrics in used.test(module, val[0], verbose=False) + used.validate(module, val, verbose=False):
        listener.note("result", metrics)
    return listener.heard


@sampled(
    2,
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
    heard = on_device(talk, 2 * n, size, val_sizes)
    for ours in on_ranks(n, talk, strategy, 2, size, val_sizes):
        for (event, wanted), (_, found) in zip(heard, ours, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6), event


class OnlyHere(Talkative):
    """Logs what other ranks do not."""

    def __init__(self, where: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.where, self.options = where, options

    def talk(self, stage: str, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 1 and stage == self.where:
            self.log("spike", 1.0, **self.options)
        return super().talk(stage, batch, batch_idx)


def talk_on_one_rank() -> None:
    for where, options in ("train_", {"on_step": True, "reduce_fx": "max"}), ("val", {}):
        run = trainer(DataParallelStrategy(), max_epochs=1)
        with pytest.raises((ValueError, RuntimeError), match="what is logged must be the same on all ranks"):
            run.fit(OnlyHere(where, options), loader(12, 2), loader(12, 2))


@pytest.mark.filterwarnings("ignore")
def test_values_that_one_rank_logs_are_an_error_on_all():
    run_on_ranks(2, talk_on_one_rank)


class ReadsOnRankZero(Callback):
    """And logs on all ranks."""

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.log("of_callback", float(module.global_rank))
        self.read(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.log("of_callback_too", float(module.global_rank))
        self.read(trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.read(trainer)

    def read(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            assert "plain" in trainer.callback_metrics or trainer.sanity_checking
            assert trainer.logged_metrics
            next(iter(trainer.val_dataloaders))
            next(iter(trainer.train_dataloader or [None]))


def read_on_rank_zero(strategy: Any) -> None:
    used = trainer(strategy, callbacks=[ReadsOnRankZero()], max_epochs=2, num_sanity_val_steps=2)
    used.fit(Talkative(), loader(9, 2, shuffle=True), loader(5, 2))
    assert used.callback_metrics["of_callback"] == used.callback_metrics["of_callback_too"] == 0.5
    gathered = used.strategy.all_gather(torch.tensor(float(used.global_rank)))
    assert gathered.tolist() == [0.0, 1.0]


@pytest.mark.filterwarnings("ignore")
def test_reads_on_rank_zero_wait_for_nobody():
    run_on_ranks(2, read_on_rank_zero, DataParallelStrategy())


@partial(torch.compile, backend="aot_eager", fullgraph=True)
def compiled(logits: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return nn.functional.cross_entropy(logits, classes), (logits.argmax(-1) == classes).sum(), logits.max()


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
                "largest_of_numpy": torch.tensor(errors.detach().numpy().max()),
            },
            "min": {"smallest": errors.abs().min()},
        }
        for how, value in zip(("mean", "sum", "max"), compiled(logits, batch[1]), strict=True):
            values[how]["compiled"] = value.float()
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


TO_REDUCE = layouts("data parallel", "data parallel of 4", "tensor x data parallel", "pipeline", "pipeline x zero 2")
ONE_SAMPLE = (16, 10), (10, 16)  # in microbatches of the last batch, of validation or of training


def each_reduced(strategy: Any, batch_size: int, sizes: Any) -> Any:
    torch._dynamo.reset()
    return [heard for each in sizes for heard in reducing(strategy, batch_size, *each)]


@sampled(1, "layout", TO_REDUCE)
def test_reductions_are_those_of_full_batches(layout: str) -> None:
    (n, readers, strategy), sizes = TO_REDUCE[layout], [(20, 12), *(ONE_SAMPLE if layout == "pipeline" else ())]
    expected = begun_on_one(each_reduced, None, 8, sizes)
    for found in run_on_ranks(n, each_reduced, strategy, 8 // readers, sizes):
        for wanted, got in zip(expected.result(), found, strict=True):
            few = {name: value for name, value in wanted[1].items() if name.startswith("few")}
            assert got[1] | few == pytest.approx(wanted[1], rel=1e-4, abs=1e-5), wanted[0]


class Counts(Plain):
    """Logs counts and a maximum by the default reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.best, self.seen, self.shown = 0.0, list[Any](), list[dict[str, float]]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, _ = self.score(batch)
        hits = (logits.argmax(-1) == batch[1]).float()
        self.best = max(self.best, hits.mean().item())
        self.log_dict({"tensor": hits.sum(), "item": hits.sum().item(), "best": self.best})
        self.log("weighed", hits[0], batch_size=int(hits.sum()) + 1)
        self.seen.append([hits.sum().item(), self.best, hits[0].item()])
        return nn.functional.cross_entropy(logits, batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        self.shown.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


def counted() -> Any:
    torch.manual_seed(0)
    module = Counts()
    trainer(DataParallelStrategy(), max_epochs=1).fit(module, *loaders("plain", 4, samples=32, val_samples=8))
    return module.seen, module.shown


def test_mean_over_ranks_is_the_default_reduction() -> None:
    (one, shown), (other, also_shown) = run_on_ranks(2, counted)
    assert shown == also_shown
    for mine, theirs, found in zip(one, other, shown, strict=True):
        hits, best, _ = [(a + b) / 2 for a, b in zip(mine, theirs, strict=True)]
        assert found["tensor"] == found["item"] == hits
        assert found["best"] == pytest.approx(best)
        weights = mine[0] + 1, theirs[0] + 1
        assert found["weighed"] == pytest.approx((mine[2] * weights[0] + theirs[2] * weights[1]) / sum(weights))
