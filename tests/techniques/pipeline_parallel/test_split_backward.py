"""A backward that is split into input and weight gradients gives those of one backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.func import vmap

from lightning_parallel.techniques.pipeline_parallel.gradients import Gradients, save
from lightning_parallel.techniques.pipeline_parallel.split_backward import SplitBackward


class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def of_each(maps: Maps, x: Tensor) -> Tensor:
    return vmap(maps, in_dims=1, out_dims=1)(x)


def inner_and_output(maps: Maps, x: Tensor) -> list[Tensor]:
    inner = torch.tanh(maps.up(x))
    return [inner, maps.down(inner)]  # which keeps what it read, for the gradient of its weight


FORWARDS: dict[str, tuple[bool, Callable[[Maps, Tensor], Any]]] = {
    "once": (True, lambda maps, x: x + maps(x)),
    "side by side": (True, lambda maps, x: maps(x) + maps(2 * x)),
    "one after the other": (False, lambda maps, x: maps(maps(x))),
    "of each row": (True, lambda maps, x: x + of_each(maps, x)),
    "of all and of each row": (False, lambda maps, x: maps(x) + of_each(maps, x)),  # with a bias added by itself
    "output that a layer reads": (True, inner_and_output),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_split_backward_gives_the_gradients_of_one(name: str) -> None:
    torch.manual_seed(0)
    splits, forward = FORWARDS[name]
    maps, x, unused = Maps(), torch.randn(2, 3, 4, requires_grad=True), torch.ones(2, requires_grad=True)
    parameters = list(maps.parameters())

    def outputs() -> list[Tensor]:
        made = forward(maps, x)
        return made if isinstance(made, list) else [made]

    whole, made = outputs(), outputs()
    seeds = [torch.randn_like(each) for each in whole]
    expected = torch.autograd.grad(whole, [x, *parameters], seeds)
    assert SplitBackward([get_gradient_edge(each) for each in made], [x], parameters).can_split is splits
    gradients, saved = Gradients(dict(maps.named_parameters())), save([x, unused], made)
    found, none = gradients.of_inputs(saved, seeds)
    gradients.of_weights(saved)
    assert none is None
    assert [parameter.grad for parameter in parameters] == [None] * 4
    for wanted, got in zip(expected, [found, *gradients.sums], strict=True):
        torch.testing.assert_close(got, wanted)


def test_gradient_that_was_sent_does_not_change() -> None:
    x, weight, seed = torch.ones(3, requires_grad=True), nn.Parameter(torch.ones(3)), torch.ones(3)
    gradients = Gradients({"weight": weight})
    first, second = (save([x], [x + weight]) for _ in range(2))
    (sent,) = gradients.of_inputs(first, [seed])
    gradients.of_weights(first)
    gradients.of_inputs(second, [seed.clone()])
    gradients.of_weights(second)
    assert sent.tolist() == [1, 1, 1]
    assert gradients.sums[0].tolist() == [2, 2, 2]


class Stops(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def test_function_that_returns_no_gradient() -> None:
    x, stopped, weight = (torch.ones(2, 2, requires_grad=True) for _ in range(3))
    halves = SplitBackward([get_gradient_edge(Stops.apply(x @ stopped) + x @ weight)], [x], [stopped, weight])
    assert halves.of_inputs([torch.ones(2, 2)])[0].tolist() == [[2, 2], [2, 2]]
    (none, found), _ = halves.of_parameters()
    assert none is None
    assert found.tolist() == [[2, 2], [2, 2]]
