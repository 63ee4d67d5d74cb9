"""Callbacks that let parts of a model learn from a later epoch on, also where a rank has nothing that learns before."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning

from lightning_parallel import (
    HybridStrategy,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from tests.models import TiedWords
from tests.strategies.one_and_two import MakeStrategy, assert_like_one_device, made
from tests.strategies.test_averaged_weights import fitted
from tests.tiers import sampled


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
LAYOUTS: list[tuple[int, int, Any]] = [
    (4, 2, partial(HybridStrategy, ZBV, Zero(2, stage=2))),
    (4, 2, partial(HybridStrategy, ZBV, Zero(2, stage=1))),
    (4, 2, partial(HybridStrategy, ZBV, Zero(2, stage=3))),
    (4, 1, partial(HybridStrategy, ZBV, TensorParallel(2))),
    (2, 1, partial(PipelineParallelStrategy, 2, schedule="zbv", microbatches=2)),
    (2, 2, partial(ZeroStrategy, stage=1)),
    (2, 2, partial(ZeroStrategy, stage=3)),
    (2, 1, partial(TensorParallelStrategy, 2)),
    (4, 2, partial(HybridStrategy, TensorParallel(2), Zero(2, stage=2))),
]


@sampled(1, "layout", LAYOUTS[3:])
def test_what_learns_later_does_so_as_on_one_device(layout: tuple[int, int, Any]) -> None:
    ranks, readers, strategy = layout
    assert_like_one_device(thawed, ranks, (None, 1), (strategy, readers))


@sampled(1, "layout", LAYOUTS[:3])
def test_a_rank_on_which_nothing_learns_at_first(layout: tuple[int, int, Any]) -> None:
    test_what_learns_later_does_so_as_on_one_device(layout)
