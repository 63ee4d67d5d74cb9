"""Decisions of rules are kept by the forms of their operands, and not taken for those of other calls."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided import rules, table  # noqa: F401
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import ranks


def two_ranks() -> Ranks:
    return Ranks(dist.group.WORLD, "tp")


def values(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) / 7


def halves(among: Ranks, whole: Tensor, dim: int) -> Divided:
    elements = among.chunks(whole.shape[dim])
    return Divided(elements.take(whole, dim).contiguous(), {dim: elements})


@ranks(2)
def test_calls_that_differ_are_decided_anew() -> None:
    """By gradients, by the type of a number, by the shape of a plain operand; as many as are kept."""
    among, whole = two_ranks(), values(2, 8)
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
    for other in (values(2, 1), values(8), values(2, 8), values(1, 1), values(2, 1)):
        assert torch.equal((halves(among, whole, 1) + other).whole(), whole + other)
    tensor = halves(among, values(2, 8), 1)
    for number in range(table.KEPT + 10):  # numbers that change with every step are forgotten
        tensor * (number + 0.5)
    assert len(tensor.form.calls) <= table.KEPT
