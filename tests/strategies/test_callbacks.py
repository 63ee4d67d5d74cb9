"""Lightning's own callbacks decide and do under a strategy what they do on one device."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
)
from lightning.pytorch.loggers import CSVLogger

from tests.layouts import LAYOUTS
from tests.strategies.runs import Run, Watched, fit, loader, on_device, on_ranks, require_same_values
from tests.tiers import sampled
from tests.trainers import trainer

pytestmark = pytest.mark.filterwarnings("ignore:(Swapping scheduler|The .*scheduler|.*checkpoint directory)")


def data(batch_size: int) -> Any:
    return loader(18, batch_size, shuffle=True), loader(5, batch_size)


def fit_writing(strategy: Any, batch_size: int) -> Run:
    prunes = ModelPruning(pruning_fn="l1_unstructured", amount=0.5, parameters_to_prune=None)
    accumulates = GradientAccumulationScheduler(scheduling={0: 1, 1: 2, 3: 3})
    return fit(strategy, data, batch_size, callbacks=[prunes, accumulates], max_epochs=4)


@sampled(1, "layout", ["zero 2", "data parallel"])
def test_callbacks_write_full_parameters(layout: str) -> None:
    expected = on_device(fit_writing, 4)
    for run in on_ranks(2, fit_writing, LAYOUTS[layout].strategy, 2):
        require_same_values(expected, run)


class Plateau(Watched):
    """Its learning rate follows a logged value."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss_epoch"}}


def decide(strategy: Any, batch_size: int) -> Any:
    torch.manual_seed(1)
    module, seen = Plateau(), list[Any]()
    keeps = ModelCheckpoint(monitor="loss_epoch", save_top_k=2, filename="{epoch}")
    stops = EarlyStopping("metric", patience=2, min_delta=0.02)
    summary = ModelSummary()
    summary.summarize = lambda _, total, trainable, *__, **___: seen.append((total, trainable))
    used = trainer(
        strategy,
        max_epochs=12,
        callbacks=[keeps, stops, LearningRateMonitor("epoch"), summary],
        enable_checkpointing=True,
        enable_model_summary=True,
        logger=CSVLogger(trainer().default_root_dir, version=0),
    )
    used.fit(module, loader(18, batch_size, shuffle=True), loader(7, batch_size))
    assert seen == [(3, 3)] * used.is_global_zero
    best = {path.split("/")[-1]: float(score) for path, score in keeps.best_k_models.items()}
    return best, stops.stopped_epoch, stops.wait_count, used.optimizers[0].param_groups[0]["lr"]


@sampled(1, "layout", ["zero 3", "data parallel", "zero 1"])
def test_decisions_are_those_of_one_device_on_every_rank(layout: str) -> None:
    best, *others = on_device(decide, 4)
    for found, *found_others in on_ranks(2, decide, LAYOUTS[layout].strategy, 2):
        assert found == pytest.approx(best, rel=1e-5)
        assert found_others == pytest.approx(others)
