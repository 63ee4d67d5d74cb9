"""Everything of Lightning's that hangs on values or on parameters does under a pipeline what it does on one device."""

import warnings
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel import ActivationCheckpoint, HybridStrategy, PipelineParallel
from tests.curves import check_parity
from tests.heard import heard
from tests.models import Plain, build, loaders, points
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import (
    PIPELINE,
    ZBV,
    MakeStrategy,
    assert_like_one_device,
    made,
    on_one_and_two,
    require_like,
    scratch,
)
from tests.tiers import sampled
from tests.trainers import trainer

# ---------------------------------------------------------------- callbacks, schedulers, loggers


class Plateau(Plain):
    """Lowers its learning rate where the validation loss does not fall, as it soon will not."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=2.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Sees(Callback):
    """What a callback sees at every hook: values by their names, outputs, learning rates, gradients' norm."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, trainer: Trainer, *more: Any) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seen.append([values, trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"], *more])

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.note(trainer, float(outputs["loss"]), outputs["logits"].clone())

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.note(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self.note(trainer)


def watched(strategy: MakeStrategy | None) -> Any:
    torch.manual_seed(0)
    sees, stopping = Sees(), EarlyStopping("val_loss", patience=1)
    saving = ModelCheckpoint(scratch() / "kept", monitor="val_accuracy", mode="max", save_top_k=2, save_last=True)
    run = trainer(
        made(strategy),
        max_epochs=4,
        val_check_interval=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        num_sanity_val_steps=2,
        enable_checkpointing=True,
        callbacks=[sees, stopping, saving],
    )
    run.fit(Plateau(), *loaders("plain", 8, samples=16, val_samples=12))
    scores = [float(score) for score in saving.best_k_models.values()]
    return sees.seen, stopping.stopped_epoch, stopping.wait_count, scores, Path(saving.best_model_path).name


def test_callbacks_see_on_every_rank_what_they_see_on_one_device() -> None:
    expected, found = on_one_and_two(watched)
    assert expected[1] > 0, "training was to stop early"
    for rank in found:
        require_like(expected[:-1], rank[:-1])
        assert rank[-1] == expected[-1]


def logged(strategy: MakeStrategy | None) -> list[dict[str, str]]:
    import csv

    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(scratch(), name="lines", version=0)
    run = trainer(
        made(strategy), max_epochs=2, logger=logger, log_every_n_steps=1, callbacks=[LearningRateMonitor("step")]
    )
    run.fit(build("plain"), *loaders("plain", 8, samples=24, val_samples=12))
    if not run.is_global_zero:
        return []
    with Path(logger.log_dir, "metrics.csv").open() as file:
        return [{name: float(value) for name, value in line.items() if value} for line in csv.DictReader(file)]


def test_loggers_get_the_same_lines() -> None:
    expected, (first, _) = on_one_and_two(logged)
    assert any("lr-AdamW" in line for line in expected)
    require_like(expected, first)


# ---------------------------------------------------------------- validate, test, predict


def evaluated(strategy: MakeStrategy | None) -> Any:
    model, run = build("plain"), trainer(made(strategy), max_epochs=1)
    train, val = loaders("plain", 8, samples=16, val_samples=13)  # the last batch has fewer samples
    before = run.validate(model, val, verbose=False)
    run.fit(model, train, val)
    predictions = run.predict(model, val)
    after = run.test(model, val, verbose=False)
    alone = model(torch.ones(3, 13))  # and the module is whole and usable afterwards
    return before, predictions, after, [part.detach() for part in alone]


@sampled(1, "strategy", [ZBV, PIPELINE], ids=["zbv", "1f1b"])
def test_evaluation_and_prediction_in_any_order(strategy: MakeStrategy) -> None:
    expected, found = on_one_and_two(evaluated, strategy)
    assert len(torch.cat(expected[1])) == 13
    for rank in found:
        require_like(expected, rank)


def summarised(strategy: MakeStrategy | None) -> tuple[int, int, list[int]]:
    class Look(Callback):
        def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
            summary = ModelSummary(module, max_depth=1)
            self.seen = summary.total_parameters, summary.trainable_parameters, summary.param_nums

    look = Look()
    run = trainer(made(strategy), max_steps=1, callbacks=[look], enable_model_summary=True)
    run.fit(build("gpt"), *loaders("gpt", 8))
    return look.seen


def test_summary_is_of_the_whole_model() -> None:
    expected, found = on_one_and_two(summarised)
    assert found == [expected, expected]


# ---------------------------------------------------------------- what a step keeps on the module


class Keeping(Plain):
    """Keeps values for the end of the epoch, in ways that a pipeline sends to all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.classes: list[int] = []
        self.rows: list[dict[str, Tensor]] = []
        self.samples, self.first, self.largest = 0, 0, torch.zeros(2)
        self.table = {str(number): number for number in range(3)}
        self.recent, self.total, self.counts = deque[int](maxlen=2), torch.zeros(2), np.zeros(2)

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
    model = Keeping()
    run = trainer(made(strategy), max_epochs=2)
    run.fit(model, *loaders("plain", 8, samples=22, val_samples=8))  # the last batch has 6, its microbatches 2 or 1
    values = {name: float(value) for name, value in run.callback_metrics.items()}
    found = [values, model.samples, model.last, model.largest, model.table, len(model.losses)]
    return [*found, list(model.recent), model.total, torch.from_numpy(model.counts)], model.first


@sampled(1, "strategy", [PIPELINE, ZBV], ids=["1f1b", "zbv"])
def test_what_a_step_sets_and_appends_is_on_every_rank(strategy: MakeStrategy) -> None:
    (expected, steps), found = on_one_and_two(kept, strategy)
    for rank, calls in found:
        require_like(expected, rank)
        assert (steps, calls) == (6, 6 * 4)  # once for each microbatch


@dataclass
class Record:
    losses: list[float] = field(default_factory=list)


class KeepsDeeper(Plain):
    """Changes what is in containers and objects, and keeps what cannot be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[int, float] = {}
        self.outputs: dict[str, list[Any]] = {"logits": []}
        self.unlike = SimpleNamespace(hits=0)
        self.note: Any = None
        self.record, self.names = Record(), set[str]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.history[batch_idx] = output["loss"].item()
        self.outputs["logits"].append(output["logits"].detach())
        self.unlike.hits += 1
        self.note = lambda: None
        self.record.losses.append(self.history[batch_idx])
        self.names.add(str(self.history[batch_idx]))
        return output


def deeper() -> tuple[list[str], list[int]]:
    with heard() as lines:
        model = KeepsDeeper()
        trainer(PIPELINE(), max_epochs=2).fit(model, *loaders("plain", 8, samples=24, val_samples=8))
    told = [line for line in lines if "stays on the rank of the last stage" in line]
    found = [len(model.history), len(model.outputs["logits"]), model.unlike.hits]
    return told, [*found, len(model.record.losses), len(model.names)]


def test_nested_changes_stay_on_the_last_stage_and_are_told() -> None:
    (told, first), (others, last) = run_on_ranks(2, deeper)
    (line,) = told
    assert line.startswith("self.history, self.outputs, self.unlike, self.note, self.record, self.names: ")
    assert "on_train_batch_end(outputs, ...)" in line
    assert not others
    assert first == [0] * 5
    assert last == [3, 24, 24, 24, 24]


# ---------------------------------------------------------------- beside other techniques


def recomputing() -> HybridStrategy:
    return HybridStrategy(PipelineParallel(2), ActivationCheckpoint())


@sampled(1, "column", ["gpt", "plain"])
def test_recomputation(column: str) -> None:
    check_parity(column, 2, recomputing, max_epochs=1, data={"samples": 24, "val_samples": 8})


# ---------------------------------------------------------------- the names of a step's arguments


class Terse(Plain):
    """Steps whose arguments have names of their own, which Lightning gives by their places."""

    def training_step(self, rows: Any, _: int) -> Any:
        return super().training_step(rows, _)

    def validation_step(self, rows: Any, i: int, dataloader_idx: int) -> None:
        errors = self.score(rows)[1]
        self.log("error", errors.square().mean() + 10 * dataloader_idx + i)


def tersely(strategy: MakeStrategy | None) -> Any:
    torch.manual_seed(0)
    module = Terse()
    train, val = loaders("plain", 8, samples=16, val_samples=16)
    fitting = trainer(made(strategy), max_epochs=1)
    fitting.fit(module, train, [val, val])
    fitted = {name: float(value) for name, value in fitting.callback_metrics.items()}
    return fitted, trainer(made(strategy)).validate(module, [val, val], verbose=False)


def test_step_may_call_its_arguments_anything() -> None:
    assert_like_one_device(tersely, 2, (None,), (PIPELINE,))


class Joins(Plain):
    """Trains on the samples of two loaders at once, one of which comes to its end in the middle of a batch."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        both = [each for each in batch.values() if each is not None]
        return super().training_step([torch.cat(same) for same in zip(*both, strict=True)], batch_idx)


def joined(strategy: Any) -> list[list[float]]:
    warnings.filterwarnings("ignore", ".*ambiguous collection")
    torch.manual_seed(0)
    seen: list[list[float]] = []
    module = Joins()
    module.on_train_batch_end = lambda *_: seen.append([float(module.trainer.callback_metrics["train_loss_step"])])
    two = {"long": DataLoader(points(24, seed=1), 8), "short": DataLoader(points(13, seed=2), 8)}
    trainer(made(strategy), max_epochs=2).fit(module, CombinedLoader(two, "max_size"), DataLoader(points(8, seed=3), 8))
    return [*seen, *([float(value.sum())] for value in module.state_dict().values())]


def test_loaders_one_of_which_ends_in_the_middle_of_a_batch() -> None:
    assert_like_one_device(joined, 2, (None,), (PIPELINE,))


class Seeds(Plain):
    """Seeds and draws before the first batch, as users do to vary the data and not the weights."""

    def on_fit_start(self) -> None:
        torch.manual_seed(9)
        torch.rand(3)


def seeded(strategy: Any) -> list[Any]:
    torch.manual_seed(0)
    module, seen = Seeds(), []
    module.on_train_batch_end = lambda *_: seen.append(float(module.trainer.callback_metrics["train_loss_step"]))
    data = loaders("plain", 8, samples=32, val_samples=8, shuffle=True)
    trainer(made(strategy), max_epochs=2).fit(module, *data)
    return [seen, torch.rand(1).item()]


def test_hooks_before_the_first_batch_may_seed_what_shuffles() -> None:
    assert_like_one_device(seeded, 2, (None,), (PIPELINE,))
