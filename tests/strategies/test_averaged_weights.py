"""Lightning's callbacks that average weights do so where ranks have parts of them; what they save is read anywhere."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    ContextParallel,
    DataParallelStrategy,
    HybridStrategy,
    LayerParallelStrategy,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from lightning_parallel.techniques.tools import global_shard
from tests.models import TiedWords
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, assert_like_one_device, made, scratch
from tests.tiers import sampled
from tests.trainers import trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:(Swapping scheduler|The .*scheduler|.*checkpoint directory|Be aware that when using)"
)


def fitted(
    strategy: Any,
    readers: int,
    callbacks: list[Callback],
    epochs: int,
    start: str | None = None,
    kind: type[TiedWords] = TiedWords,
    **options: Any,
) -> Any:
    random, module = torch.Generator().manual_seed(1), kind()
    data = TensorDataset(*(torch.randint(TiedWords.words, (24, 6), generator=random) for _ in range(2)))
    loader = partial(DataLoader, data, 8 // readers)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    options |= {"precision": "64-true", "max_epochs": epochs, "enable_checkpointing": saves}
    run = trainer(strategy, callbacks=callbacks, **options)
    run.fit(module, loader(), loader(), ckpt_path=start)
    after = run.validate(module, loader(), verbose=False)
    return module.losses, after, {name: value.clone() for name, value in module.state_dict().items()}


def averaged(strategy: MakeStrategy | None, readers: int, start: str | None) -> Any:
    """A run that saves, and one that goes on from there; and one that goes on from where one device had saved."""
    path = scratch() / "averaged"
    saver = ModelCheckpoint(path, save_last=True)
    first = fitted(made(strategy), readers, [EMAWeightAveraging(decay=0.8), saver], 1)
    starts = [str(path / "last.ckpt"), start or str(path / "last.ckpt")]
    return first, [fitted(made(strategy), readers, [EMAWeightAveraging(decay=0.8)], 2, each) for each in starts]


def saved_by_one(path: str) -> None:
    fitted(made(None), 1, [EMAWeightAveraging(decay=0.8), ModelCheckpoint(path, save_last=True)], 1)


PIPELINE = partial(PipelineParallelStrategy, 2, microbatches=4)
LAYOUTS: list[tuple[int, int, Any]] = [
    (2, 1, partial(PIPELINE, checkpoint="sharded")),
    (2, 2, partial(ZeroStrategy, stage=3)),
    (2, 1, partial(TensorParallelStrategy, 2)),
    (2, 1, partial(LayerParallelStrategy, 2)),
    (2, 2, partial(ZeroStrategy, stage=3, checkpoint="sharded", async_save=True)),
    (2, 1, partial(TensorParallelStrategy, 2, checkpoint="sharded")),
    (4, 2, partial(HybridStrategy, PipelineParallel(2, microbatches=2), Zero(2, stage=2), checkpoint="sharded")),
    (4, 1, partial(HybridStrategy, PipelineParallel(2, microbatches=2), TensorParallel(2))),
    (4, 2, partial(HybridStrategy, Zero(2, stage=3), ContextParallel(2))),
    (2, 1, PIPELINE),
    (2, 2, DataParallelStrategy),
    (2, 2, partial(ZeroStrategy, stage=1)),
    (2, 2, partial(ZeroStrategy, stage=2)),
]


@sampled(2, "layout", LAYOUTS)
def test_averages_of_weights_are_those_of_one_device(layout: tuple[int, int, Any], tmp_path: Any) -> None:
    ranks, readers, strategy = layout
    begun_on_one(saved_by_one, str(tmp_path)).result()
    assert_like_one_device(averaged, ranks, (None, 1, None), (strategy, readers, str(tmp_path / "last.ckpt")))


def gathers() -> tuple[int, Any]:
    with mock.patch.object(global_shard, "whole_tensor", wraps=global_shard.whole_tensor) as gather:
        average = EMAWeightAveraging(decay=0.9, update_every_n_steps=4)
        fitted(ZeroStrategy(stage=3), 2, [average], 3, limit_val_batches=0)
        kinds = {type(parameter) for parameter in average._average_model.module.parameters()}
        return gather.call_count, kinds


def test_average_keeps_shards_and_gathers_nothing() -> None:
    for found in run_on_ranks(2, gathers):
        assert found == (0, {global_shard.GlobalShard})


class ByRank(EMAWeightAveraging):
    """Updates its average on some ranks only."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == dist.get_rank()


def unlike() -> Any:
    return fitted(ZeroStrategy(stage=3), 2, [ByRank(decay=0.9)], 1)[0]


def test_averages_updated_at_other_times_make_nobody_wait() -> None:
    for losses in run_on_ranks(2, unlike):
        assert len(losses) == 3


def stochastic(strategy: MakeStrategy | None, readers: int) -> Any:
    return fitted(made(strategy), readers, [StochasticWeightAveraging(0.05, swa_epoch_start=1)], 4)


@sampled(1, "layout", LAYOUTS[1:])
def test_stochastic_averages_are_those_of_one_device(layout: tuple[int, int, Any]) -> None:
    ranks, readers, strategy = layout
    assert_like_one_device(stochastic, ranks, (None, 1), (strategy, readers))
