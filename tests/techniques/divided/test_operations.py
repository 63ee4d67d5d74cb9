"""Whatever is done with a divided tensor, ranks get the values and gradients of the whole one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided import (
    rules,  # noqa: F401
    table,
)
from lightning_parallel.techniques.divided.functions import FunctionsGetFullTensors
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import ranks
from tests.techniques.divided.operations import DIVISIONS, OPERATIONS, SPELLED, values
from tests.tiers import sampled

Operation = Callable[[Tensor, Tensor], Any]
Loss = Callable[[Operation, Any, Any, "Ranks | None"], Tensor]
WAYS = ("plain", "parameter", "averaged")
"""Who reduces the gradient of what ranks have alike: where it is used, or when a step ends, over tp or cp ranks."""


def whole(made: Any) -> Tensor:
    return made.whole() if isinstance(made, Divided) else made


def of_each(operation: Operation, x: Any, w: Any, among: Ranks | None) -> Tensor:
    """Each element of the result counts with a weight of its own."""
    made = whole(operation(x, w))
    (made * torch.linspace(1, 2, made.numel(), dtype=made.dtype).view(made.shape)).sum().backward()
    return made.detach()


def of_gradients(operation: Operation, x: Any, w: Any, among: Ranks | None) -> Tensor:
    """A loss of gradients by both, with a history of its own."""
    made = whole(operation(x, w))
    weights = torch.linspace(1, 2, made.numel(), dtype=made.dtype).view(made.shape)
    wanted = [each for each in (x, w) if each.requires_grad]
    found = torch.autograd.grad((small(made).sin() * weights).sum(), wanted, create_graph=True, allow_unused=True)
    found = [each for each in found if each is not None]
    loss = whole(sum((small(each).cos() * (1 + n)).sum() for n, each in enumerate(found)) + made.square().sum())
    if among is not None:
        among.reduces_later = True
    loss.backward()
    return loss.detach()


def small(x: Tensor) -> Tensor:
    """So that rounding is not all that is left of a sine."""
    return x / (1 + x.detach().abs().max())


def compared(operation: Operation, division: dict[int, Any], way: str = "plain", loss: Loss = of_each) -> None:
    x, w = values()
    x.requires_grad_(), w.requires_grad_()
    expected = loss(operation, x, w, None)
    among = Ranks(dist.group.WORLD, "tp")
    among.averages = (lambda _: True) if way == "averaged" else None
    among.reduces_later = loss is of_each
    (dim, make), *_ = division.items()
    elements = make(among)
    own, mine = elements.take(x.detach(), dim).clone().requires_grad_(), replicated(w, way)
    with FunctionsGetFullTensors():
        found = loss(operation, Divided(own, {dim: elements}), mine, among)
    close = {"rtol": 1e-10, "atol": 1e-12} if loss is of_each else {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own.grad, elements.take(x.grad, dim), **close)
    if w.grad is None:
        return
    if way != "plain":  # what makes the gradient of a parameter that all have alike as a mean
        dist.all_reduce(mine.grad)
        mine.grad /= dist.get_world_size()
    torch.testing.assert_close(mine.grad, w.grad, **close)


def replicated(w: Tensor, way: str) -> Any:
    mine: Any = w.detach().clone().requires_grad_() if way == "plain" else nn.Parameter(w.detach().clone())
    if way == "parameter":
        mine._replicated_path = "w"
    return mine


def require(operations: dict[str, Operation], division: str, loss: Loss = of_each) -> None:
    failed = []
    for name, operation in operations.items():
        for way in WAYS:
            try:
                compared(operation, DIVISIONS[division], way, loss)
            except Exception as error:
                failed.append(f"{name} ({way}): {type(error).__name__} {str(error)[:300]}")
    assert not failed, "\n".join(failed)


def twice(operation: Operation) -> Operation:
    """The second call is one that is remembered."""
    return lambda x, w: operation(x, w) + operation(x, w)


@sampled(1, "division", DIVISIONS)
@ranks(2)
def test_values_and_gradients_are_those_of_the_whole(division: str) -> None:
    require(OPERATIONS | {f"spelled {name}": twice(each) for name, each in SPELLED.items()}, division)


@pytest.mark.exhaustive
@pytest.mark.parametrize("division", ["sequence zigzag", "features", "heads on one rank", "features on one rank"])
@ranks(2)
def test_second_derivatives_are_those_of_the_whole(division: str) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        twice_differentiable = OPERATIONS.keys() - {"of a reentrant checkpoint", "margins"}  # as torch's own
        require({name: OPERATIONS[name] for name in sorted(twice_differentiable)}, division, of_gradients)


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) / 7


def halves(among: Ranks, whole: Tensor, dim: int) -> Divided:
    elements = among.chunks(whole.shape[dim])
    return Divided(elements.take(whole, dim).contiguous(), {dim: elements})


@ranks(2)
def test_calls_that_differ_are_decided_anew() -> None:
    """By gradients, by the type of a number, by the shape of a plain operand; as many as are kept."""
    among, whole = Ranks(dist.group.WORLD, "tp"), numbers(2, 8)
    factor = torch.tensor([[2.0], [3.0]], requires_grad=True)
    with torch.no_grad():
        halves(among, whole, 1) * factor
    for learns in (True, False, True):
        factor.requires_grad_(learns)
        factor.grad = None
        made = halves(among, whole, 1) * factor
        assert torch.equal(made.whole(), whole * factor)
        if learns:  # its gradient is the sum of what ranks have computed
            made.sum().backward()
            assert torch.allclose(factor.grad, whole.sum(1, keepdim=True))
    integers = halves(among, torch.arange(16).view(2, 8), 1)
    assert ((integers * 1).dtype, (integers * 1.0).dtype) == (torch.int64, torch.float32)
    integers.view(2, 8, 1)
    with pytest.raises(TypeError):
        integers.view(2.0, 8, 1)
    for other in (numbers(2, 1), numbers(8), numbers(2, 8), numbers(1, 1), numbers(2, 1)):
        assert torch.equal((halves(among, whole, 1) + other).whole(), whole + other)
    tensor = halves(among, numbers(2, 8), 1)
    for number in range(table.KEPT + 10):  # numbers that change with every step are forgotten
        tensor * (number + 0.5)
    assert len(tensor.form.calls) <= table.KEPT
