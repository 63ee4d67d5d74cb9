"""Everything of Lightning's that hangs on values or on parameters does under a pipeline what it does on one device."""

import csv
import math
import warnings
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from tests.curves import check_parity
from tests.heard import heard
from tests.models import Plain, build, loaders, points
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import (
    PIPELINE,
    ZBV,
    MakeStrategy,
    Sees,
    assert_like_one_device,
    made,
    on_one_and_two,
    require_like,
    scratch,
)
from tests.tiers import sampled
from tests.trainers import trainer

# ---------------------------------------------------------------- callbacks, schedulers, loggers, metrics, draws


class Plateau(Plain):
    """Lowers its learning rate where the validation loss does not fall, as it soon will not.

    It gives metrics its loss, one number for a microbatch, and the samples that it is a mean over; and it seeds and
    draws before the first batch, as users do to vary the data and not the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called, self.updated, self.total = MeanMetric(), MeanMetric(), SumMetric()

    def on_fit_start(self) -> None:
        torch.manual_seed(9)
        torch.rand(3)
        summary = ModelSummary(self, max_depth=1)
        self.summary = summary.total_parameters, summary.trainable_parameters, summary.param_nums

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.updated.update(output["loss"], weight=len(batch[0]))
        self.total.update(output["loss"] * len(batch[0]))
        self.log("called", self.called(output["loss"], weight=len(batch[0])), on_step=True, on_epoch=True)
        self.log_dict({"updated": self.updated, "total": self.total}, on_step=False, on_epoch=True)
        return output

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=2.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def watched(strategy: MakeStrategy | None) -> Any:
    torch.manual_seed(0)
    module, sees, stopping = Plateau(), Sees(), EarlyStopping("val_loss", patience=1)
    saving = ModelCheckpoint(scratch() / "kept", monitor="val_accuracy", mode="max", save_top_k=2, save_last=True)
    logger = CSVLogger(scratch(), name="lines", version=0)
    run = trainer(
        made(strategy),
        max_epochs=4,
        val_check_interval=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        num_sanity_val_steps=2,
        enable_checkpointing=True,
        enable_model_summary=True,
        logger=logger,
        callbacks=[sees, stopping, saving, LearningRateMonitor("step")],
    )
    run.fit(module, *loaders("plain", 8, samples=21, val_samples=12, shuffle=True))
    scores = [float(score) for score in saving.best_k_models.values()]
    stopped = stopping.stopped_epoch, stopping.wait_count, Path(saving.best_model_path).name
    found = [sees.seen, stopped, scores, module.summary, torch.rand(1).item()]
    if not run.is_global_zero:
        return found, []
    with Path(logger.log_dir, "metrics.csv").open() as file:
        return found, [{name: float(value) for name, value in line.items() if value} for line in csv.DictReader(file)]


def test_callbacks_loggers_and_draws_are_those_of_one_device() -> None:
    (expected, lines), found = on_one_and_two(watched)
    assert expected[1][0] > 0, "training was to stop early"
    assert any("lr-SGD" in line for line in lines)
    for rank, _ in found:
        require_like(expected, rank)
    require_like(lines, found[0][1])


# ---------------------------------------------------------------- validate, test, predict


def evaluated(strategy: MakeStrategy | None) -> Any:
    model, run = build("plain"), trainer(made(strategy), max_epochs=1)
    train, val = loaders("plain", 8, samples=16, val_samples=13)  # the last batch has fewer samples
    before = run.validate(model, val, verbose=False)
    run.fit(model, train, val)
    predictions = run.predict(model, val)
    assert not any("zero_grad" in vars(each) for each in run.optimizers), "they have their own again"
    after = run.test(model, val, verbose=False)
    alone = model(torch.ones(3, 13))  # and the module is whole and usable afterwards
    return before, predictions, after, [part.detach() for part in alone]


@sampled(1, "strategy", [ZBV, PIPELINE], ids=["zbv", "1f1b"])
def test_evaluation_and_prediction_in_any_order(strategy: MakeStrategy) -> None:
    expected, found = on_one_and_two(evaluated, strategy)
    assert len(torch.cat(expected[1])) == 13
    for rank in found:
        require_like(expected, rank)


# ---------------------------------------------------------------- what a step keeps on the module


class Keeping(Plain):
    """Keeps values for the end of the epoch, in ways that a pipeline sends to all ranks, and in such that it does not.

    What changes in containers and objects, and what cannot be sent, stays on the last stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.classes: list[int] = []
        self.rows: list[dict[str, Tensor]] = []
        self.samples, self.first, self.largest = 0, 0, torch.zeros(2)
        self.recent, self.total, self.counts = deque[int](maxlen=2), torch.zeros(2), np.zeros(2)
        self.history: dict[int, float] = {}
        self.outputs: dict[str, list[Any]] = {"logits": []}
        self.unlike, self.note = SimpleNamespace(hits=0), None
        self.names = set[str]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.first += 1  # before the blocks
        output = super().training_step(batch, batch_idx)
        self.losses.append(output["loss"].detach() * len(batch[0]))
        self.classes += output["logits"].argmax(-1).tolist()
        self.rows.append({"loss": output["loss"], "classes": output["logits"].argmax(-1)})
        self.samples += len(batch[0])
        self.last, self.largest[0] = batch[0][-1], 1.0
        self.recent.extend(batch[1].tolist())
        self.total += len(batch[0])
        self.counts[0] += len(batch[0])
        self.history[batch_idx] = output["loss"].item()
        self.outputs["logits"].append(output["logits"].detach())
        self.unlike.hits += 1
        self.note = lambda: None
        self.names.add(str(self.history[batch_idx]))
        return output

    def on_train_epoch_end(self) -> None:
        self.log("mean_of_losses", torch.stack(self.losses).sum() / len(self.classes))
        self.log("sum_of_classes", float(sum(self.classes)))
        self.log("sum_of_rows", torch.cat([row["classes"] for row in self.rows]).sum().float())
        self.losses.clear()
        self.classes.clear()
        self.rows = []


def kept(strategy: MakeStrategy | None) -> Any:
    torch.manual_seed(0)
    model, run = Keeping(), trainer(made(strategy), max_epochs=2)
    with heard() as lines:
        run.fit(model, *loaders("plain", 8, samples=22, val_samples=8))  # the last batch has 6, its microbatches 2 or 1
    values = {name: float(value) for name, value in run.callback_metrics.items()}
    found = [values, model.samples, model.last, model.largest, len(model.losses)]
    deeper = [len(model.history), len(model.outputs["logits"]), model.unlike.hits, len(model.names)]
    told = [line for line in lines if "on the rank of the last stage only" in line]
    return [*found, list(model.recent), model.total, torch.from_numpy(model.counts)], model.first, deeper, told


@sampled(1, "strategy", [PIPELINE, ZBV], ids=["1f1b", "zbv"])
def test_kept_values_are_on_every_rank_or_told_of(strategy: MakeStrategy) -> None:
    (expected, steps, _, _), found = on_one_and_two(kept, strategy)
    for rank, calls, _, _ in found:
        require_like(expected, rank)
        assert (steps, calls) == (6, 6 * 4)  # once for each microbatch
    deeper = [rank[2] for rank in found]
    assert sorted(deeper) == [[0] * 4, [3, 24, 24, 24]]
    assert strategy is ZBV or deeper[0] == [0] * 4
    (line,), others = (rank[3] for rank in found)
    assert line.startswith("self.history, self.outputs, self.unlike, self.note, self.names: ")
    assert "on_train_batch_end(outputs, ...)" in line
    assert not others


# ---------------------------------------------------------------- the names of a step's arguments, and two loaders


class Terse(Plain):
    """Steps whose arguments have names of their own, which Lightning gives by their places.

    It trains on the samples of two loaders at once, one of which comes to its end in the middle of a batch.
    """

    def training_step(self, rows: dict[str, Any], _: int) -> Any:
        both = [each for each in rows.values() if each is not None]
        return super().training_step([torch.cat(same) for same in zip(*both, strict=True)], _)

    def validation_step(self, rows: Any, i: int, dataloader_idx: int) -> None:
        errors = self.score(rows)[1]
        self.log("error", errors.square().mean() + 10 * dataloader_idx + i)


def tersely(strategy: MakeStrategy | None) -> Any:
    warnings.filterwarnings("ignore", ".*ambiguous collection")
    torch.manual_seed(0)
    module, losses = Terse(), list[float]()
    module.on_train_batch_end = lambda *_: losses.append(float(module.trainer.callback_metrics["train_loss_step"]))
    two = {"long": DataLoader(points(24, seed=1), 8), "short": DataLoader(points(13, seed=2), 8)}
    val = DataLoader(points(16, seed=3), 8)
    fitting = trainer(made(strategy), max_epochs=2)
    fitting.fit(module, CombinedLoader(two, "max_size"), [val, val])
    fitted = {name: float(value) for name, value in fitting.callback_metrics.items()}
    validated = trainer(made(strategy)).validate(module, [val, val], verbose=False)
    return losses, fitted, validated, {name: value.clone() for name, value in module.state_dict().items()}


def test_step_may_call_its_arguments_anything_and_join_loaders() -> None:
    assert_like_one_device(tersely, 2, (None,), (PIPELINE,))


# ---------------------------------------------------------------- low precision, and losses that are no number


class Poisoned(Plain):
    """In its second batch the gradients of what the first block holds overflow, and of nothing else."""

    validation_step = LightningModule.validation_step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
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


def overflow(strategy: MakeStrategy, clip: float | None) -> list[tuple[float, bool]]:
    """The scale after each step, and whether blocks moved."""
    torch.manual_seed(0)
    seen, module = list[Any](), Poisoned()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100))
    run = trainer(strategy(), plugins=[plugin], max_steps=3, gradient_clip_val=clip)

    def sums() -> list[float]:
        return [float(parameter.detach().double().sum()) for parameter in module.blocks.parameters()]

    module.on_train_batch_start = lambda *_: seen.append(sums())
    module.on_train_batch_end = lambda *_: seen.append((plugin.scaler.get_scale(), sums() != seen.pop()))
    run.fit(module, loaders("plain", 8).train)
    return seen


@sampled(1, ("strategy", "clip"), [(PIPELINE, 0.5), (ZBV, None)], ids=["1f1b", "zbv"])
def test_overflow_on_one_stage_skips_the_step_on_all(strategy: MakeStrategy, clip: float | None) -> None:
    for seen in run_on_ranks(2, overflow, strategy, clip):
        assert seen == [(2.0**10, True), (2.0**9, False), (2.0**9, True)]


@sampled(1, ("precision", "rtol"), [("bf16-true", 5e-2), ("bf16-mixed", 2e-2)])
def test_precisions(precision: str, rtol: float) -> None:
    model = {"optimizer": partial(torch.optim.SGD, lr=0.05), "num_hidden_layers": 2}
    run = {"precision": precision, "max_epochs": 1, "data": {"samples": 24, "val_samples": 8}}
    check_parity("llama", 2, PIPELINE, rtol=rtol, model=model, **run)
