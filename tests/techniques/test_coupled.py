"""Which optimizers let the step of one parameter look at others, told without a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_parallel.techniques.gradients.coupled import couples
from tests.techniques.test_optimizers import EVERY


class OverAll(optim.SGD):
    """Has one norm over all gradients, from which it takes a Python number."""

    def norms(self) -> list[Tensor]:
        return [each.grad.norm() for group in self.param_groups for each in group["params"] if each.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        total = sum(norm.item() ** 2 for norm in self.norms()) ** 0.5
        for parameter in (each for group in self.param_groups for each in group["params"]):
            parameter.sub_(parameter.grad / total)


class OnlyAboveOne(OverAll):
    """Clips itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        total = torch.stack(self.norms()).norm().clamp(min=100)
        for parameter in (each for group in self.param_groups for each in group["params"]):
            parameter.sub_(parameter.grad / total)


class RunningNorm(OverAll):
    """Is coupled from its second step on, by what the first one kept."""

    running: Any = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (each for group in self.param_groups for each in group["params"]):
            parameter.sub_(parameter.grad / self.running)
        self.running = torch.stack(self.norms()).norm()


class ByWeights(OverAll):
    """Reads the weights of all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = [each for group in self.param_groups for each in group["params"]]
        total = sum(each.norm() for each in every)
        for parameter in every:
            parameter.sub_(parameter.grad * total)


class SharpnessAware(OverAll):
    """Moves along all gradients at once, and steps by what its closure finds there."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        total = torch.stack(self.norms()).norm()
        moved = [each.grad / total for group in self.param_groups for each in group["params"]]
        every = [each for group in self.param_groups for each in group["params"]]
        for parameter, by in zip(every, moved, strict=True):
            parameter.add_(by)
        closure()
        for parameter, by in zip(every, moved, strict=True):
            parameter.sub_(by)
        return super(OverAll, self).step()


class Lookahead(optim.Optimizer):
    """Wraps another one, and draws weights towards older ones; each by itself."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, {}, inner.state
        self.slow = {each: each.detach().clone() for group in self.param_groups for each in group["params"]}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.slow[parameter].lerp_(parameter, 0.5))


def groups(layers: int = 3) -> list[dict[str, Any]]:
    made = [nn.Linear(6, 5) for _ in range(layers)]
    return [{"params": [*layer.parameters()]} for layer in made]


def parameters() -> Iterable[nn.Parameter]:
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2)).parameters()


SEARCHING = partial(optim.LBFGS, line_search_fn="strong_wolfe", max_iter=3)
KINDS = [OverAll, OnlyAboveOne, RunningNorm, ByWeights, SharpnessAware, optim.LBFGS, SEARCHING]


@pytest.mark.parametrize("kind", KINDS)
def test_one_norm_or_direction_for_all_is_found(kind: Any) -> None:
    assert couples(kind(parameters(), lr=0.1))


@pytest.mark.parametrize("kind", [OverAll, RunningNorm])
def test_also_across_groups_and_on_meta(kind: Any) -> None:
    made = groups()
    for group in made:
        group["params"] = [nn.Parameter(each.detach().to("meta")) for each in group["params"][:1]]
    assert couples(kind(made, lr=0.1))


@pytest.mark.parametrize("name", [name for name in EVERY if "LBFGS" not in name])
def test_what_steps_each_parameter_by_itself_is_none(name: str) -> None:
    assert not couples(EVERY[name](parameters()))


def test_one_that_wraps_another_is_none() -> None:
    assert not couples(Lookahead(optim.Adam(groups(), lr=0.1)))
    assert couples(Lookahead(OverAll(groups(), lr=0.1)))


def test_the_optimizer_itself_is_left_alone() -> None:
    made = [*parameters()]
    before = [each.detach().clone() for each in made]
    optimizer = optim.Adafactor(made)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    drawn = torch.get_rng_state()
    assert not couples(optimizer)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not optimizer.state
    assert all(each.grad is None for each in made)
    assert all(torch.equal(*pair) for pair in zip(made, before, strict=True))
    with pytest.warns(UserWarning, match="before `optimizer.step"):  # the trial was no step
        scheduler.step()


def test_what_cannot_be_tried_is_left_to_its_first_step() -> None:
    class Asks(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("needs more than this")

    assert not couples(Asks(parameters(), lr=0.1))
