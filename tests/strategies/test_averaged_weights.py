"""Lightning's callbacks that average weights do so where ranks have parts of them; what they save is read anywhere."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    ContextParallel,
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
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, made, require_like, scratch
from tests.tiers import sampled
from tests.trainers import trainer

WORDS, WIDTH, LENGTH = 19, 8, 6

pytestmark = pytest.mark.filterwarnings(
    "ignore:(Swapping scheduler|The .*scheduler|.*checkpoint directory|Be aware that when using)"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tied(LightningModule):
    """Words predicted by the weight that embeds them; it counts its steps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))
        self.losses: list[Tensor] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.embed(batch[0])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1
        self.losses.append(self.trainer.callback_metrics["loss"].clone())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def fitted(
    strategy: Any,
    readers: int,
    callbacks: list[Callback],
    epochs: int,
    start: str | None = None,
    kind: type[Tied] = Tied,
    **options: Any,
) -> Any:
    random, module = torch.Generator().manual_seed(1), kind()
    data = TensorDataset(*(torch.randint(WORDS, (24, LENGTH), generator=random) for _ in range(2)))
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
]


@sampled(2, "layout", LAYOUTS)
def test_averages_of_weights_are_those_of_one_device(layout: tuple[int, int, Any], tmp_path: Any) -> None:
    ranks, readers, strategy = layout
    begun_on_one(saved_by_one, str(tmp_path)).result()
    begun = begun_on_one(averaged, None, 1, None)
    for found in run_on_ranks(ranks, averaged, strategy, readers, str(tmp_path / "last.ckpt")):
        require_like(begun.result(), found)


def gathers() -> tuple[int, Any]:
    with mock.patch.object(global_shard, "whole_tensor", wraps=global_shard.whole_tensor) as gather:
        average = EMAWeightAveraging(decay=0.9, update_every_n_steps=4)
        fitted(ZeroStrategy(stage=3), 2, [average], 3, limit_val_batches=0)
        kinds = {type(parameter) for parameter in average._average_model.module.parameters()}
        return gather.call_count, kinds


def test_an_average_keeps_shards_and_gathers_nothing() -> None:
    for found in run_on_ranks(2, gathers):
        assert found == (0, {global_shard.GlobalShard})


class ByRank(EMAWeightAveraging):
    """Updates its average on some ranks only."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == dist.get_rank()


def unlike() -> Any:
    return fitted(ZeroStrategy(stage=3), 2, [ByRank(decay=0.9)], 1)[0]


def test_averages_that_ranks_update_at_other_times_make_nobody_wait() -> None:
    for losses in run_on_ranks(2, unlike):
        assert len(losses) == 3


def stochastic(strategy: MakeStrategy | None, readers: int) -> Any:
    return fitted(made(strategy), readers, [StochasticWeightAveraging(0.05, swa_epoch_start=1)], 4)


@sampled(1, "layout", LAYOUTS[1:])
def test_stochastic_averages_are_those_of_one_device(layout: tuple[int, int, Any]) -> None:
    ranks, readers, strategy = layout
    begun = begun_on_one(stochastic, None, 1)
    for found in run_on_ranks(ranks, stochastic, strategy, readers):
        require_like(begun.result(), found)
