"""What compares samples, or sets parameters from them, sees those of all ranks where the plan names the module."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import DataParallelStrategy, ParallelPlan
from tests.layouts import layouts
from tests.models import Optimized, adamw
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, assert_like_one_device, made
from tests.trainers import trainer

nowhere: dict[str, Any] = {"nn": nn, "__name__": "nowhere"}
exec("class Elsewhere(nn.Linear): pass", nowhere)


class Learned(nn.Module):
    """A contrast that learns how sharp it is, with a loss for each sample or their mean."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.sharp, self.reduction = nn.Parameter(torch.tensor(2.0)), reduction

    def forward(self, one: Tensor, other: Tensor, scale: Tensor) -> Tensor:
        logits = F.normalize(one, dim=1) @ F.normalize(other, dim=1).t() * self.sharp * scale
        return F.cross_entropy(logits, torch.arange(len(logits)), reduction=self.reduction)


class Pairs(Optimized):
    """Weights are learned in what compares, beside it, and before a number is handed to it."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network, self.head = nowhere["Elsewhere"](6, 4), nn.Linear(4, 3)
        self.contrast, self.scale = Learned(reduction), nn.Parameter(torch.tensor(0.5))
        self.make_optimizer = partial(torch.optim.SGD, lr=0.1)  # whose steps show by how much a gradient counts

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(whole_batch="contrast")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        one, other = map(self.network, batch.unbind(1))
        loss = self.contrast(one, other, self.scale.exp()).mean() + F.mse_loss(self.head(one), batch[:, 0, :3])
        self.log("train_loss", loss)
        return loss


def trained(strategy: Any, samples: int, reduction: str, of: int) -> list[Any]:
    module = Pairs(reduction)
    data = DataLoader(torch.randn(of, 2, 6, generator=torch.Generator().manual_seed(1)), batch_size=samples)
    run = trainer(made(strategy), max_epochs=2)
    run.fit(module, data)
    return [run.callback_metrics["train_loss"], *module.state_dict().values()]


@pytest.mark.parametrize(("reduction", "of"), [("none", 13), pytest.param("mean", 17, marks=pytest.mark.exhaustive)])
def test_contrast_of_all_samples_and_batches_that_do_not_divide(reduction: str, of: int) -> None:
    assert_like_one_device(trained, 2, (None, 8, reduction, of), (DataParallelStrategy, 4, reduction, of))


LAYOUTS = layouts("data parallel", "zero 1", "zero 2", "zero 3", "tensor x zero 1")


class SetsScale(nn.Module):
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


class SetsParameters(Optimized):
    def __init__(self, named: bool, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.make_optimizer, self.named = SetsScale(in_place), adamw, named
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


def set_and_trained(named: bool, in_place: bool, strategy: MakeStrategy | None, batch: int = 8) -> Any:
    module, data = SetsParameters(named, in_place), torch.randn(24, 6, generator=torch.Generator().manual_seed(1)) * 3
    run = trainer(made(strategy), max_epochs=3, num_sanity_val_steps=0)
    run.fit(module, DataLoader(data, batch), DataLoader(data, batch))
    return module.losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("layout", "in_place"),
    [("zero 3", True), pytest.param("data parallel", False, marks=pytest.mark.exhaustive)]
    + [pytest.param(name, True, marks=pytest.mark.exhaustive) for name in ("zero 1", "zero 2")],
)
def test_parameters_set_in_a_module_that_sees_the_full_batch(layout: str, in_place: bool) -> None:
    strategy = LAYOUTS[layout].strategy
    assert_like_one_device(set_and_trained, 2, (True, in_place, None), (True, in_place, strategy, 4))


def refused(strategy: Any) -> None:
    said = r"(?s)first.scale: the 2 ranks with replicas.*in a module named in ParallelPlan"
    with pytest.raises(ValueError, match=said):
        set_and_trained(False, True, strategy, 4)


@pytest.mark.parametrize("layout", ["tensor x zero 1", pytest.param("zero 2", marks=pytest.mark.exhaustive)])
def test_copies_set_elsewhere_would_part_and_are_refused(layout: str) -> None:
    run_on_ranks(LAYOUTS[layout].ranks, refused, LAYOUTS[layout].strategy)
