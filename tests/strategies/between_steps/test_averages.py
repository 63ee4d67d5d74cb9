"""Lightning's callbacks that average weights, or let parts of a model learn later, where ranks have parts of it."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import PipelineParallel, TensorParallel, Zero, ZeroStrategy
from lightning_parallel.techniques.tools import global_shard
from lightning_parallel.techniques.tools.global_shard import GlobalShard
from tests.layouts import Layout, hybrid, layouts
from tests.models import TiedWords
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import (
    MakeStrategy,
    assert_like_one_device,
    made,
    scratch,
)
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
    """A run that saves, one that goes on from there, and one that goes on from where one device had saved; and SWA."""
    path = scratch() / "averaged"
    saver = ModelCheckpoint(path, save_last=True)
    first = fitted(made(strategy), readers, [EMAWeightAveraging(decay=0.8), saver], 1)
    starts = [str(path / "last.ckpt"), start or str(path / "last.ckpt")]
    later = [fitted(made(strategy), readers, [EMAWeightAveraging(decay=0.8)], 2, each) for each in starts]
    return first, later, fitted(made(strategy), readers, [StochasticWeightAveraging(0.05, swa_epoch_start=1)], 3)


def saved_by_one(path: str) -> None:
    fitted(made(None), 1, [EMAWeightAveraging(decay=0.8), ModelCheckpoint(path, save_last=True)], 1)


LAYOUTS = {
    "zero 3": layouts("zero 3")["zero 3"],
    **layouts("data parallel", "tensor parallel", "zero 2", "context x zero 3", "pipeline x tensor"),
    "zero 3, sharded": layouts("zero 3", checkpoint="sharded", async_save=True)["zero 3"],
    "tensor parallel, sharded": layouts("tensor parallel", checkpoint="sharded")["tensor parallel"],
    "pipeline x zero 2, sharded": layouts("pipeline x zero 2", checkpoint="sharded")["pipeline x zero 2"],
    "pipeline": layouts("pipeline")["pipeline"],
}


@sampled(2, "layout", LAYOUTS)
def test_averages_of_weights_are_those_of_one_device(layout: str, tmp_path: Any) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    begun_on_one(saved_by_one, str(tmp_path)).result()
    assert_like_one_device(averaged, ranks, (None, 1, None), (strategy, readers, str(tmp_path / "last.ckpt")))


class ByRank(EMAWeightAveraging):
    """Updates its average on some ranks only."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == dist.get_rank()


class Counting(Callback):
    """Reads a number of the configuration, as counters of operations do."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.width = module.layers[0].up.in_features
        assert type(module.layers[0].up.weight) is GlobalShard


def gathers() -> Any:
    average, strategy = EMAWeightAveraging(decay=0.9, update_every_n_steps=2), partial(ZeroStrategy, stage=3)
    with mock.patch.object(global_shard, "full_tensor_of", wraps=global_shard.full_tensor_of) as gather:
        fitted(strategy(), 2, [average, Counting()], 2, limit_val_batches=0)
        assert gather.call_count == 0
    assert {type(parameter) for parameter in average._average_model.module.parameters()} == {GlobalShard}
    return len(fitted(strategy(), 2, [ByRank(decay=0.9)], 1)[0])


def test_averages_keep_shards_and_wait_for_nobody() -> None:
    assert run_on_ranks(2, gathers) == [3, 3]


class Thawing(BaseFinetuning):
    """The blocks learn one half after the other; until then only what embeds words does."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        layers = {1: pl_module.layers[1:3], 2: [pl_module.layers[0], pl_module.layers[3]]}
        if epoch in layers:
            self.unfreeze_and_add_param_group(layers[epoch], optimizer, lr=0.01 / epoch)


class Partly(TiedWords):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.02)


def thawed(strategy: MakeStrategy | None, readers: int) -> Any:
    return fitted(made(strategy), readers, [Thawing()], 3, kind=Partly, gradient_clip_val=0.4)


ZBV = PipelineParallel(2, microbatches=2, schedule="zbv")  # whose second rank has nothing but blocks
THAWED = {
    **layouts("zbv", "zero 1", "zero 3", "tensor x zero 2"),
    "zbv x zero 2": Layout(4, 2, hybrid(ZBV, Zero(2, stage=2))),
    "zbv x zero 3": Layout(4, 2, hybrid(ZBV, Zero(2))),
    "zbv x tensor": Layout(4, 1, hybrid(ZBV, TensorParallel(2))),
}


@sampled(1, "layout", THAWED)
def test_parameters_that_learn_later(layout: str) -> None:
    """Also where a rank has nothing that learns before."""
    ranks, readers, strategy = THAWED[layout]
    assert_like_one_device(thawed, ranks, (None, 1), (strategy, readers))
