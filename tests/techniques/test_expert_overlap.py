"""Shared experts are computed while tokens travel."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel import DataParallel, ExpertParallel, ParallelPlan
from lightning_parallel.collectives.functional import Pending
from lightning_parallel.mesh import ParallelMesh, resolve_sizes
from lightning_parallel.techniques.division import Ground
from lightning_parallel.techniques.expert_parallel import travel
from lightning_parallel.techniques.step import Run, Step
from tests.further.experts import WIDTH, Bank, Router
from tests.ranks import ranks

LATE = 0.4  # how long a message takes, in seconds: much longer than ranks that share cores wait for one


class Slow(nn.Linear):
    """A shared expert that takes longer than a message, forward and backward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        time.sleep(1.3 * LATE)
        made = super().forward(x)
        if made.requires_grad:
            made.register_hook(lambda _: time.sleep(1.3 * LATE))
        return made


class Shared(nn.Module):
    """Experts, and one that all tokens go to; `late` gives it something else."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.shared = Router(4, 2), Bank(4), Slow(WIDTH, WIDTH)
        self.late = False

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x)
        made = self.experts(x, index, weights)
        return made + self.shared(x + made if self.late else x)


class Late:
    """Messages that take some time, and how long somebody waited for them."""

    def __init__(self) -> None:
        self.waited: list[float] = []
        self._start = travel.start_exchange

    def __call__(self, *args: Any) -> tuple[Tensor, Pending]:
        arriving, pending = self._start(*args)
        ready = time.monotonic() + LATE

        def wait() -> None:
            begin = time.monotonic()
            pending.wait()
            time.sleep(max(0.0, ready - time.monotonic()))
            self.waited.append(time.monotonic() - begin)

        return arriving, Pending(None, wait)


def divided() -> tuple[nn.Module, Step, nn.Module]:
    """A model over two ranks, its step, and the same model whole."""
    torch.manual_seed(0)
    model, whole = Shared().double(), Shared().double()
    whole.load_state_dict(model.state_dict())
    mesh = ParallelMesh(resolve_sizes([DataParallel(2).claim], 2), "cpu")
    ground = Ground(mesh, ParallelPlan(experts="experts"), lambda: None)  # type: ignore[arg-type, return-value]
    technique = ExpertParallel(2)
    division = technique.divide(model, ground, technique.look(model, ground))
    return model, division.step(Step()), whole


def batch(step: Step, model: nn.Module, x: Tensor) -> Tensor:
    return step.forward(Run(model), x)


@ranks(2)
def test_from_the_second_batch_on_nobody_waits_for_what_experts_made() -> None:
    model, step, whole = divided()
    late = Late()
    with mock.patch.object(travel, "start_exchange", late):
        for number in range(3):
            x = torch.randn(3, 5, WIDTH, dtype=torch.double, generator=torch.Generator().manual_seed(dist.get_rank()))
            x.requires_grad_()
            late.waited.clear()
            Slow.calls = 0
            made = batch(step, model, x)
            assert Slow.calls == 1
            expected = whole(x)
            torch.testing.assert_close(made, expected)
            gradient = torch.autograd.grad(made.square().sum(), [x, model.shared.weight])
            torch.testing.assert_close(gradient[0], torch.autograd.grad(expected.square().sum(), x)[0])
            waits = late.waited[-2:]  # of the way home, forward and backward
            if number == 0:
                assert waits[0] > 0.5 * LATE
            else:
                assert max(waits) < 0.3 * LATE, waits


@ranks(2)
def test_what_gets_something_else_is_computed_when_it_is_called() -> None:
    model, step, whole = divided()
    for late in (False, False, True, True, False):
        model.late = whole.late = late
        x = torch.randn(3, 5, WIDTH, dtype=torch.double)
        torch.testing.assert_close(batch(step, model, x), whole(x))
