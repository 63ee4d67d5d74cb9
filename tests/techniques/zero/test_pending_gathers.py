"""Gathers that are pending in the next forward: every reader of a parameter sees all of it, however late a rank is."""

from __future__ import annotations

import copy
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from lightning_parallel.mesh import ParallelMesh, resolve_sizes
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.zero import Zero
from lightning_parallel.techniques.zero.pending_gathers import AllGatherQueue, PendingAllGather, PendingParameter
from lightning_parallel.techniques.zero.states import ShardedStatesStep
from tests.ranks import ranks

LATE = 0.05
ROWS = 5  # three of rank 0, two of rank 1
LARGE = 100_000  # columns of a parameter that is gathered where it lies


class Net(nn.Module):
    def __init__(self, columns: int = 4) -> None:
        super().__init__()
        self.inside, self.outside = (nn.Parameter(torch.zeros(ROWS, columns)) for _ in range(2))
        self.blocks = nn.ModuleList([Block(self.inside)])

    def forward(self, scale: Tensor) -> Tensor:
        return (self.blocks[0]() + self.outside).mean() * scale


class Block(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self) -> Tensor:
        return self.weight * 1


class Sharded:
    """A net of two parameters, of each of which two ranks keep rows."""

    def __init__(self, net: Net) -> None:
        self.net, self.parameters, self.value = net, [net.inside, net.outside], 0.0
        mesh = ParallelMesh(resolve_sizes([Zero(2, stage=2).claim], 2), "cpu")
        self.step = ShardedStatesStep(Step(), self.parameters, mesh, 2, False, net, net.blocks)

    def train(self, forward: Callable[..., Tensor] | None = None) -> None:
        """A batch, after which the optimizer adds one to every element; rank 1 is late."""
        loss = self.step.forward(self.net if forward is None else forward, torch.ones(()))
        self.step.backward(loss.backward)
        self.add_one()

    def add_one(self) -> None:
        for parameter in self.parameters:
            self.step.stored(parameter).to_local().add_(1.0)
        if dist.get_rank() == 1:
            time.sleep(LATE)
        self.step.after_optimizer_step(self.parameters)
        self.value += 1.0

    @property
    def waiting(self) -> list[bool]:
        return [type(parameter) is PendingParameter for parameter in self.parameters]


@contextmanager
def sharded(columns: int = 4) -> Iterator[Sharded]:
    """After a step rows of the block are on their way."""
    made = Sharded(Net(columns))
    made.train()
    try:
        yield made
    finally:
        made.step.close()
        assert made.waiting == [False, False]


def in_forked_process(parameter: nn.Parameter) -> Tensor:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, pickle.dumps(parameter.tolist()))
        os._exit(0)
    os.waitpid(child, 0)
    return torch.tensor(pickle.loads(os.read(reading, 100_000)))


USES: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "operation": lambda p: p + 0,
    "function": lambda p: F.linear(torch.eye(4), p).T,
    "tolist": lambda p: torch.tensor(p.tolist()),
    "operator": lambda p: torch.ops.aten.clone.default(p),
    "out": lambda p: torch.empty(ROWS, 4).copy_(p),
    "deepcopy": lambda p: copy.deepcopy(p),
    "memory": lambda p: torch.tensor(p.untyped_storage().tolist(), dtype=torch.uint8).view(p.dtype).view(ROWS, 4),
    "other module": lambda p: torch.func.functional_call(nn.Linear(4, ROWS, bias=False), {"weight": p}, torch.eye(4)).T,
    "autograd": lambda p: torch.autograd.grad((p * p).sum(), p)[0] / 2,
    "forked process": in_forked_process,
    "inference": lambda p: torch.inference_mode()(lambda: p.clone())().clone(),
}


@ranks(2)
def test_uses_of_pending_parameters_see_the_values_of_all_ranks() -> None:
    with sharded() as made:
        for name, use in USES.items():
            assert made.waiting == [True, False], name
            for parameter in made.parameters:
                seen = use(parameter)
                assert torch.equal(seen.detach(), torch.full((ROWS, 4), made.value)), name
                assert made.waiting == [False, False], name
                assert type(parameter) is nn.Parameter
                del seen  # it may share memory with the parameter
            made.train()
        assert made.waiting == [True, False]
        with torch.no_grad():
            made.net.inside.mul_(3.0)  # what is written stays
        assert made.net.inside.unique().tolist() == [3 * made.value]
        made.train()
        assert made.net.outside.unique().tolist() == [made.value]
        assert made.net.inside.unique().tolist() == [3 * (made.value - 1) + 1]
    with sharded(LARGE) as made:  # gathered in place
        assert made.waiting == [True, False]
        assert made.net.outside.unique().tolist() == [made.value]
        assert made.net.inside.unique().tolist() == [made.value]
    with sharded() as made:
        penalty = torch.compile(lambda weight: weight.sum(), backend="eager")
        for _ in range(3):
            made.net.inside.grad = None
            assert penalty(made.net.inside).item() == ROWS * 4 * made.value
            made.train()


class Unseen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return from_dlpack(to_dlpack(weight)).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


def unseen(made: Sharded, seen: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """A step that uses the parameter of a block as a C++ extension would, and does not call the block."""

    def forward(scale: Tensor) -> Tensor:
        seen.append(Unseen.apply(made.net.inside))
        return (seen[-1] + made.net.outside).mean() * scale

    return forward


@ranks(2)
def test_blocks_that_no_step_enters_are_not_deferred() -> None:
    made, seen = Sharded(Net()), []
    for _ in range(3):
        made.train(unseen(made, seen))
        assert made.waiting == [False, False]
    assert [value.detach().unique().item() for value in seen] == [0.0, 1.0, 2.0]
    made.train(torch.compile(made.net, backend="eager"))
    assert made.waiting == [False, False]
    made.step.close()
    with sharded() as made:  # nor is memory that others use
        view = made.net.inside.data[1:]
        made.train()
        assert made.waiting == [False, False]
        assert view.unique().tolist() == [made.value]
        del view
        made.train()
        assert made.waiting == [True, False]


class Rows:
    """A message that is there, or from a rank that is gone."""

    def __init__(self, gone: bool) -> None:
        self.gone = gone

    def wait(self) -> None:
        if self.gone:
            raise RuntimeError("Connection closed by peer")


def test_error_before_a_rank_is_gone_is_the_one_raised() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    block = Block(parameter)
    arrivals = AllGatherQueue([block])
    block()
    arrivals.start([lambda: PendingAllGather([parameter], Rows(gone=True), 0, exposed=False)], 0)
    assert type(parameter) is PendingParameter
    with pytest.raises(ValueError, match="first"):
        raise_within(arrivals)
    assert type(parameter) is nn.Parameter


def raise_within(arrivals: AllGatherQueue) -> None:
    try:
        raise ValueError("first")
    except ValueError:
        arrivals.close()
        raise
