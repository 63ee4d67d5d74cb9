"""What compares samples with each other sees those of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import DataParallelStrategy, ParallelPlan
from tests.models import Optimized, adamw
from tests.ranks import run_on_ranks
from tests.tiers import covering
from tests.trainers import trainer

made: dict[str, Any] = {"nn": nn, "__name__": "nowhere"}
exec("class Elsewhere(nn.Linear): pass", made)


class Contrast(nn.Module):
    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        logits = F.normalize(one, dim=1) @ F.normalize(other, dim=1).t()
        return F.cross_entropy(10 * logits, torch.arange(len(logits)))


class Pairs(Optimized):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network, self.contrast, self.make_optimizer = made["Elsewhere"](6, 4), Contrast(), adamw

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(whole_batch="contrast")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.contrast(*map(self.network, batch.unbind(1)))
        if self._trainer is not None:
            self.log("train_loss", loss)
        return loss


class Learned(nn.Module):
    """A contrast that learns how sharp it is, with a loss for each sample or their mean."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.sharp, self.reduction = nn.Parameter(torch.tensor(2.0)), reduction

    def forward(self, one: Tensor, other: Tensor, scale: Tensor) -> Tensor:
        logits = F.normalize(one, dim=1) @ F.normalize(other, dim=1).t() * self.sharp * scale
        return F.cross_entropy(logits, torch.arange(len(logits)), reduction=self.reduction)


class LearnedPairs(Pairs):
    """Weights are learned in what compares, beside it, and before a number is handed to it."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.contrast, self.scale, self.head = Learned(reduction), nn.Parameter(torch.tensor(0.5)), nn.Linear(4, 3)
        self.make_optimizer = partial(torch.optim.SGD, lr=0.1)  # whose steps show by how much a gradient counts

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        one, other = map(self.network, batch.unbind(1))
        loss = self.contrast(one, other, self.scale.exp()).mean() + F.mse_loss(self.head(one), batch[:, 0, :3])
        self.log("train_loss", loss)
        return loss


def trained(samples: int, make: Callable[[], Pairs] = Pairs, of: int = 16) -> list[Any]:
    module = make()
    data = DataLoader(torch.randn(of, 2, 6, generator=torch.Generator().manual_seed(1)), batch_size=samples)
    run = trainer(DataParallelStrategy(), max_epochs=2)
    run.fit(module, data)
    return [run.callback_metrics["train_loss"], *module.state_dict().values()]


def test_contrast_of_all_samples_in_a_class_of_no_file() -> None:
    (expected,) = run_on_ranks(1, trained, 8)
    for found in run_on_ranks(2, trained, 4):
        torch.testing.assert_close(found, expected)


@covering(reduction=["mean", "none"], of=[13, 17])
def test_what_is_learned_in_it_and_batches_that_do_not_divide(reduction: str, of: int) -> None:
    make = partial(LearnedPairs, reduction)
    (expected,) = run_on_ranks(1, trained, 8, make, of)
    for found in run_on_ranks(2, trained, 4, make, of):
        torch.testing.assert_close(found, expected)
