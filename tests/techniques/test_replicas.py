"""Steps that set parameters from samples: alike on all ranks where the plan names the module, else an error."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import DataParallelStrategy, HybridStrategy, ParallelPlan, TensorParallel, Zero, ZeroStrategy
from tests.models import Optimized, adamw
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, assert_like_one_device, made
from tests.tiers import covering
from tests.trainers import trainer


class Scaled(nn.Module):
    """Takes its scale from the first batch, and learns it from then on."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.scale, self.set, self.in_place = nn.Parameter(torch.ones(6)), False, in_place

    def forward(self, x: Tensor) -> Tensor:
        if not self.set:
            self.set, scale = True, 1 / x.detach().std(0)
            if self.in_place:
                self.scale.data.copy_(scale)
            else:
                self.scale.data = scale
        return x * self.scale


class Model(Optimized):
    def __init__(self, named: bool, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.make_optimizer, self.named = Scaled(in_place), adamw, named
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(2))
        self.losses: list[float] = []

    def parallel_plan(self) -> ParallelPlan:
        styles = {"layers.*.0": "colwise", "layers.*.2": "rowwise"}
        return ParallelPlan(blocks="layers.*", styles=styles, whole_batch="first" if self.named else ())

    def loss(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics.get("loss", 0.0)))


def trained(named: bool, in_place: bool, strategy: MakeStrategy | None, batch: int = 8) -> Any:
    module, data = Model(named, in_place), torch.randn(24, 6, generator=torch.Generator().manual_seed(1)) * 3
    run = trainer(made(strategy), max_epochs=3, num_sanity_val_steps=0)
    run.fit(module, DataLoader(data, batch), DataLoader(data, batch))
    return module.losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


STRATEGIES: dict[str, Any] = {
    "data parallel": DataParallelStrategy,
    **{f"zero {stage}": partial(ZeroStrategy, stage=stage) for stage in (1, 2, 3)},
}


@covering(keep=2, layout=STRATEGIES, in_place=[True, False])
def test_parameters_set_in_a_module_that_sees_the_full_batch(layout: str, in_place: bool) -> None:
    assert_like_one_device(trained, 2, (True, in_place, None), (True, in_place, STRATEGIES[layout], 4))


def refused(strategy: Any) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        trained(False, True, strategy, 4)
    return str(error.value)


@pytest.mark.parametrize("layout", ["data parallel", "zero 1", "zero 2"])
def test_elsewhere_copies_would_part(layout: str) -> None:
    for said in run_on_ranks(2, refused, STRATEGIES[layout]):
        assert said.startswith("first.scale: the 2 ranks that hold copies hold different values after the first")
        assert "in a module that the plan names (ParallelPlan(whole_batch=...))" in said


def test_so_they_would_beside_tensor_parallelism() -> None:
    for said in run_on_ranks(4, refused, partial(HybridStrategy, Zero(2, stage=1), TensorParallel(2))):
        assert said.startswith("first.scale: the 2 ranks that hold copies")
