"""A backward in two halves gives the gradients of a whole one, also where a parameter is read in several ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import vmap

from lightning_parallel.techniques.pipeline_parallel.gradients import Gradients, save
from lightning_parallel.techniques.pipeline_parallel.halves import Halves


class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


def of_each(maps: Maps, x: Tensor) -> Tensor:
    return vmap(maps, in_dims=1, out_dims=1)(x)  # type: ignore[no-any-return]


class Mapped(torch.autograd.Function):
    """Runs a backward pass to parameters within its own, and returns no gradients of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, maps: Maps, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.maps, ctx.none = maps, [None] * len(parameters)
        return maps(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.maps(x), seed)
        return x.grad, None, *ctx.none


def by_function(maps: Maps, x: Tensor) -> Tensor:
    return x + Mapped.apply(x, maps, *maps.parameters())  # type: ignore[no-any-return, no-untyped-call]


FORWARDS: dict[str, tuple[bool, Callable[[Maps, Tensor], Tensor]]] = {
    "once": (True, lambda maps, x: x + maps(x)),
    "side by side": (True, lambda maps, x: maps(x) + maps(2 * x)),
    "one after the other": (False, lambda maps, x: maps(maps(x))),
    "of each row": (True, lambda maps, x: x + of_each(maps, x)),
    "of all and of each row": (False, lambda maps, x: maps(x) + of_each(maps, x)),  # with a bias added by itself
}


@pytest.mark.parametrize("name", FORWARDS)
def test_halves_are_a_whole_backward(name: str) -> None:
    torch.manual_seed(0)
    apart, forward = FORWARDS[name]
    maps, x, seed = Maps(), torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4)
    parameters = list(maps.parameters())
    expected = torch.autograd.grad(forward(maps, x), [x, *parameters], seed)
    output = forward(maps, x)
    assert Halves([get_gradient_edge(output)], [x], parameters).are_apart is apart
    gradients, saved = Gradients(parameters), save([x], [output])
    found = gradients.of_inputs(saved, [seed])
    gradients.of_weights(saved)
    for wanted, got in zip(expected, [*found, *gradients.sums], strict=True):
        assert got is not None
        torch.testing.assert_close(got, wanted)


def test_function_with_its_own_backward_pass_runs_once() -> None:
    torch.manual_seed(0)
    maps, x, seed = Maps(), torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4)
    parameters = list(maps.parameters())
    expected = torch.autograd.grad(x + maps(x), [x, *parameters], seed)
    gradients, saved = Gradients(parameters), save([x], [by_function(maps, x)])
    found = gradients.of_inputs(saved, [seed])
    gradients.of_weights(saved)
    assert [parameter.grad for parameter in parameters] == [None] * 4
    for wanted, got in zip(expected, [*found, *gradients.sums], strict=True):
        torch.testing.assert_close(got, wanted)


def test_what_a_stage_returns_may_be_what_its_layers_read() -> None:
    torch.manual_seed(0)
    maps, x = Maps(), torch.randn(3, 4, requires_grad=True)
    seeds, parameters = [torch.randn(3, 6), torch.randn(3, 4)], list(maps.parameters())

    def outputs() -> list[Tensor]:
        inner = torch.tanh(maps.up(x))
        return [inner, maps.down(inner)]  # which keeps what it read, for the gradient of its weight

    expected = torch.autograd.grad(outputs(), [x, *parameters], seeds)
    gradients, saved = Gradients(parameters), save([x], outputs())
    found = gradients.of_inputs(saved, seeds)
    assert saved.halves is not None
    gradients.of_weights(saved)
    for wanted, got in zip(expected, [*found, *gradients.sums], strict=True):
        torch.testing.assert_close(got, wanted)


def test_input_may_be_one_that_nothing_depends_on() -> None:
    torch.manual_seed(0)
    maps, x, unused, seed = (
        Maps(),
        torch.randn(3, 4, requires_grad=True),
        torch.ones(2, requires_grad=True),
        torch.ones(3, 4),
    )
    parameters = list(maps.parameters())
    expected = torch.autograd.grad(maps(x), [x, *parameters], seed)
    gradients, saved = Gradients(parameters), save([x, unused], [maps(x)])
    of_x, of_unused = gradients.of_inputs(saved, [seed])
    assert of_unused is None
    assert saved.halves is not None
    gradients.of_weights(saved)
    for wanted, got in zip(expected, [of_x, *gradients.sums], strict=True):
        torch.testing.assert_close(got, wanted)


def test_gradient_that_was_sent_back_does_not_change() -> None:
    x, weight, seed = torch.ones(3, requires_grad=True), nn.Parameter(torch.ones(3)), torch.ones(3)
    gradients = Gradients([weight])
    first, second = (save([x], [x + weight]) for _ in range(2))
    (sent,) = gradients.of_inputs(first, [seed])
    gradients.of_weights(first)
    gradients.of_inputs(second, [seed.clone()])
    gradients.of_weights(second)
    assert sent is not None
    assert sent.tolist() == [1, 1, 1]
    assert gradients.sums[0].tolist() == [2, 2, 2]  # type: ignore[union-attr]
