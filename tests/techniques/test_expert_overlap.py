"""Shared experts are computed while tokens travel."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel import DataParallel, ExpertParallel, ParallelPlan
from lightning_parallel.collectives.functional import Pending
from lightning_parallel.mesh import ParallelMesh, resolve_sizes
from lightning_parallel.techniques.division import PartitionContext
from lightning_parallel.techniques.expert_parallel import travel
from lightning_parallel.techniques.expert_parallel.travel import start_exchange
from lightning_parallel.techniques.step import Step
from tests.further.experts import WIDTH, Bank, Router
from tests.ranks import ranks

EVENTS: list[str] = []
"""What happened on this rank: messages that began and were waited for, and what the shared expert computed."""


class Noting(nn.Linear):
    """A shared expert that notes when it is computed, forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        EVENTS.append("forward")
        made = super().forward(x)
        if made.requires_grad:
            made.register_hook(lambda _: EVENTS.append("backward"))
        return made


class Shared(nn.Module):
    """Experts, and one that all tokens go to; `late` gives it something else."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.shared = Router(4, 2), Bank(4), Noting(WIDTH, WIDTH)
        self.late = False

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x)
        made = self.experts(x, index, weights)
        return made + self.shared(x + made if self.late else x)


def noting(*args: Any) -> tuple[Tensor, Pending]:
    arriving, pending = start_exchange(*args)
    EVENTS.append("begins")

    def wait() -> None:
        EVENTS.append("waits")
        pending.wait()

    return arriving, Pending(None, wait)


def divided() -> tuple[nn.Module, Step, nn.Module]:
    """A model over two ranks, its step, and the same model whole."""
    torch.manual_seed(0)
    model, whole = Shared().double(), Shared().double()
    whole.load_state_dict(model.state_dict())
    mesh = ParallelMesh(resolve_sizes([DataParallel(2).claim], 2), "cpu")
    ground = PartitionContext(mesh, ParallelPlan(experts="experts"), lambda: None)  # type: ignore[arg-type, return-value]
    technique = ExpertParallel(2)
    division = technique.divide(model, ground, technique.analyze(model, ground))
    return model, division.step(Step()), whole


def batch(step: Step, model: nn.Module, x: Tensor) -> Tensor:
    return step.forward(model, x)


@ranks(2)
def test_from_the_second_batch_on_nobody_waits_for_what_experts_made() -> None:
    model, step, whole = divided()
    with mock.patch.object(travel, "start_exchange", noting):
        for number in range(3):
            x = torch.randn(3, 5, WIDTH, dtype=torch.double, generator=torch.Generator().manual_seed(dist.get_rank()))
            x.requires_grad_()
            EVENTS.clear()
            made = batch(step, model, x)
            forward = EVENTS.copy()
            EVENTS.clear()
            gradient = torch.autograd.grad(made.square().sum(), [x, model.shared.weight])
            backward = EVENTS.copy()
            expected = whole(x)
            torch.testing.assert_close(made, expected)
            torch.testing.assert_close(gradient[0], torch.autograd.grad(expected.square().sum(), x)[0])
            if number == 0:
                assert forward == ["begins", "waits", "begins", "waits", "forward"]
                assert backward == ["backward", "begins", "waits"]
            else:
                assert forward == ["begins", "forward", "waits"]
                assert backward == ["begins", "backward", "waits"]


@ranks(2)
def test_what_gets_something_else_is_computed_when_it_is_called() -> None:
    model, step, whole = divided()
    for late in (False, False, True, True, False):
        model.late = whole.late = late
        x = torch.randn(3, 5, WIDTH, dtype=torch.double)
        torch.testing.assert_close(batch(step, model, x), whole(x))
