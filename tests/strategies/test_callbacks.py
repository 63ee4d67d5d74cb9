"""Lightning's own callbacks decide and do under a strategy what they do on one device, or are refused by name."""

from functools import partial
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

from lightning_parallel import DataParallelStrategy, ZeroStrategy
from tests.ranks import RanksFailed
from tests.strategies.runs import Run, Watched, fit, loader, on_device, on_ranks, require_same_values
from tests.tiers import covering, sampled
from tests.trainers import trainer

pytestmark = pytest.mark.filterwarnings("ignore:(Swapping scheduler|The .*scheduler|.*checkpoint directory)")
WHOLE = [DataParallelStrategy, partial(ZeroStrategy, stage=1), partial(ZeroStrategy, stage=2)]
ZERO_3 = partial(ZeroStrategy, stage=3)


def data(batch_size: int) -> Any:
    return loader(18, batch_size, shuffle=True), loader(5, batch_size)


def fit_with(strategy: Any, batch_size: int, kind: Any, arguments: dict[str, Any], **options: Any) -> Run:
    return fit(strategy, data, batch_size, callbacks=[kind(**arguments)], **({"max_epochs": 4} | options))


WRITING = {
    ModelPruning: {"pruning_fn": "l1_unstructured", "amount": 0.5, "parameters_to_prune": None},
    GradientAccumulationScheduler: {"scheduling": {0: 1, 1: 2, 3: 3}},
}


@covering(keep=1, kind=WRITING, strategy=WHOLE)
def test_callbacks_write_full_parameters(kind, strategy):
    expected = on_device(fit_with, 4, kind, WRITING[kind])
    for run in on_ranks(2, fit_with, strategy, 2, kind, WRITING[kind]):
        require_same_values(expected, run)


def test_callback_that_replaces_sharded_parameters_is_refused():
    with pytest.raises(RanksFailed, match=r"ranks 0, 1 failed(.|\n)*ModelPruning puts whole parameters and masks"):
        on_ranks(2, fit_with, ZERO_3, 2, ModelPruning, WRITING[ModelPruning])


class Plateau(Watched):
    """Its learning rate follows a logged value."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss_epoch"}}


def decide(strategy: Any, batch_size: int) -> Any:
    torch.manual_seed(1)
    module = Plateau()
    keeps = ModelCheckpoint(monitor="loss_epoch", save_top_k=2, filename="{epoch}")
    stops = EarlyStopping("metric", patience=2, min_delta=0.02)
    rates = LearningRateMonitor("epoch")
    used = trainer(
        strategy,
        max_epochs=12,
        callbacks=[keeps, stops, rates],
        enable_checkpointing=True,
        logger=CSVLogger(trainer().default_root_dir, version=0),
    )
    used.fit(module, loader(18, batch_size, shuffle=True), loader(7, batch_size))
    best = {path.split("/")[-1]: float(score) for path, score in keeps.best_k_models.items()}
    return best, stops.stopped_epoch, stops.wait_count, used.optimizers[0].param_groups[0]["lr"]


@sampled(1, "strategy", [DataParallelStrategy, ZERO_3])
def test_decisions_are_those_of_one_device_on_every_rank(strategy):
    best, *others = on_device(decide, 4)
    for found, *found_others in on_ranks(2, decide, strategy, 2):
        assert found == pytest.approx(best, rel=1e-5)
        assert found_others == pytest.approx(others)


def summarise(strategy: Any) -> Any:
    summary = ModelSummary()
    seen: list[Any] = []
    summary.summarize = lambda _, total, trainable, *__, **___: seen.append((total, trainable))
    used = trainer(strategy, max_epochs=1, callbacks=[summary], enable_model_summary=True)
    used.fit(Watched(), loader(4, 2))
    return seen, used.is_global_zero


@pytest.mark.parametrize("strategy", [*WHOLE, ZERO_3])
def test_summary_is_of_the_whole_model(strategy):
    for seen, first in on_ranks(2, summarise, strategy):
        assert seen == [(3, 3)] * first
