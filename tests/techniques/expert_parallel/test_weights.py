"""A step that reads weights of experts outside of their module finds those of all: penalties, norms, products."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad

from lightning_parallel import DataParallel, ExpertParallel, ExpertParallelStrategy, TensorParallel, Zero
from lightning_parallel.techniques.zero.sharded import parameters
from tests.curves import Curve, compare, curve
from tests.further.experts import Banked, Mixture
from tests.layouts import hybrid
from tests.models import loaders
from tests.ranks import begun_on_one, ranks, run_on_ranks
from tests.techniques.parity import SHORT, adamw
from tests.tiers import sampled
from tests.trainers import trainer


class Penalised(Mixture):
    """Adds to its loss what it reads of experts, and logs their norms."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = self.network.embed(batch["input_ids"])
        loss = super().loss(batch)
        if self.training:
            experts = self.network.blocks[0].mixture.experts.named_parameters()
            divided = [parameter for name, parameter in experts if "up" in name or "down" in name]
            slopes = torch.autograd.grad(loss, divided, retain_graph=True)
            # linear in what each copy of the experts finds of its own samples, so that its mean is that of one device
            along = [(slope * weight.detach()).sum() for slope, weight in zip(slopes, divided, strict=True)]
            self.log("slope", torch.stack(along).sum())
        small = 1e-2 * sum(parameter.square().sum() for parameter in self.parameters())
        first, second = (block.mixture.experts for block in self.network.blocks)
        every = first.up
        alike = (every.flatten(1) @ every.flatten(1).T).square().mean()
        spectral = torch.linalg.matrix_norm(every[1], 2)
        used = F.linear(tokens, second.up[2].T).square().mean()
        with torch.no_grad():
            self.log("length", sum(parameter.norm() for parameter in first.parameters()))
            self.log("filled", sum(parameter.norm(0) for parameter in first.parameters()))
        columns = sum(parameter.norm(2, 0).sum() for parameter in first.parameters() if parameter.dim() > 1)
        planes = sum(torch.linalg.vector_norm(parameter, dim=0).sum() for parameter in second.parameters())
        return loss + small * loss.detach() + 1e-2 * (alike + spectral + used + columns + planes)


LAYOUTS: dict[str, Any] = {
    "zero 3, two copies in units": (4, hybrid(Zero(4), ExpertParallel(2)), 4),
    "zero 3": (2, hybrid(Zero(2), ExpertParallel(2)), 2),
    "tensor": (4, hybrid(DataParallel(2), TensorParallel(2), ExpertParallel(2)), 2),
    "zero 1, two copies": (4, hybrid(Zero(4, stage=1), ExpertParallel(2)), 4),
}


def trained(
    make_strategy: Any, readers: int, model: type[Mixture] = Penalised, unit_bytes: int = parameters.UNIT_BYTES
) -> Curve:
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", ".*sync_dist=True")  # Lightning's own, even of one process
    options: dict[str, Any] = {"max_steps": 3, "precision": "64-true", "gradient_clip_val": 0.5}
    strategy = make_strategy if isinstance(make_strategy, str) else make_strategy()
    data = loaders("banked_experts", 8 // readers, **SHORT)
    with mock.patch.object(parameters, "UNIT_BYTES", unit_bytes):
        return curve(partial(trainer, strategy, **options), model(Banked, adamw), data)


@sampled(1, "layout", LAYOUTS)
def test_what_is_read_of_experts(layout: str) -> None:
    count, strategy, readers = LAYOUTS[layout]
    expected = begun_on_one(trained, "auto", 1)
    size = {"unit_bytes": 64} if "units" in layout else {}
    for got in run_on_ranks(count, trained, strategy, readers, **size):
        compare(expected.result(), got, 1e-9)


class Adapted(Mixture):
    """Runs with weights that a step made of its own."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        made = {name: each - 0.1 * each.detach() for name, each in self.network.named_parameters()}
        return functional_call(self.network, made, (batch["input_ids"],)).square().mean()


class Transformed(Mixture):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return grad(lambda scale: (self.network(batch["input_ids"]) * scale).square().mean())(torch.ones(()).double())


def test_weights_that_a_step_made() -> None:
    expected = begun_on_one(trained, "auto", 1, Adapted)
    for got in run_on_ranks(2, trained, partial(ExpertParallelStrategy, 2), 2, Adapted):
        compare(expected.result(), got, 1e-9)


@ranks(2)
def test_transforms_are_refused_with_a_remedy() -> None:
    with pytest.raises(RuntimeError, match=r"mixture.experts is called in a transform[^\0]*use torch.autograd.grad"):
        trained(partial(ExpertParallelStrategy, 2), 2, Transformed)
