"""Tensors that another stage holds: operations absorb them, and their values cannot be read or written."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.techniques.tools.absent import Absent, AbsentError
from tests.techniques.tools.parameter_uses import cells

HOST = torch.device("cpu")


def absent(learns: bool = False, parameter: bool = False) -> Absent:
    return Absent(torch.empty(8, 6), HOST, "layers.0.weight", learns=learns, parameter=parameter)


READS = """
a.sum().item() | bool((a > 0).any()) | a.tolist() | a.numpy() | numpy.asarray(a) | f"{a.sum():.2f}"
torch.equal(a, r) | torch.allclose(a, r) | a.nonzero() | a.masked_select(r > 0) | a.unique() | [1, 2, 3][a.argmax()]
a.data_ptr() | a.untyped_storage() | pickle.dumps(a)
"""
INTO_INTERMEDIATE = """
r.add_(a) | r.copy_(a) | r.__setitem__(0, a[0]) | r.index_add_(0, torch.arange(8), a)
r.masked_fill_(torch.eye(8, 6, dtype=torch.bool), a.sum())
"""  # writes after which a tensor that nothing else knows is absent itself
WRITES = """
torch.add(a, 1, out=r) | torch._foreach_add_([r], [a]) | r[2:4].mul_(a[2:4])
F.batch_norm(a, r[0], r[1].abs(), training=True)
"""
ABSORBED = """
(a + r) * (r + a) / (r - a) ** (a @ r.T @ r) | F.linear(r, a) | torch.cat([a, r]) | torch.where(r > 0, a, r)
F.scaled_dot_product_attention(a[None], r[None], r[None]) | F.cross_entropy(a, torch.arange(8) % 6)
torch.linalg.vector_norm(a) | a[r > 0].sum() | a.to(torch.bfloat16) | a.clone().mul_(r) | nn.LSTM(6, 5)(a)[0]
torch.fft.rfft(a).abs() | torch.cdist(a, r) | torch.quantile(a, 0.9, dim=-1, keepdim=True) | a.data.view(-1)
"""


def evaluated(cell: str, a: Tensor, r: Tensor) -> Any:
    names = {"a": a, "r": r, "torch": torch, "nn": nn, "F": F, "numpy": numpy, "pickle": pickle}
    return eval(cell, names)


def test_reads_of_absent_tensors_raise() -> None:
    for read in cells(READS):
        with pytest.raises(AbsentError, match=r"layers\.0\.weight is .*another stage of the pipeline has it"):
            evaluated(read, absent(), torch.zeros(8, 6))


@pytest.mark.parametrize("known", ["", "by a view", "by autograd", "as a buffer", "as a parameter"])
def test_writes_into_tensors_that_others_know_raise(known: str) -> None:
    for write in cells(INTO_INTERMEDIATE if known else WRITES):
        weight = nn.Parameter(torch.randn(8, 6))
        real = weight if known == "as a parameter" else weight.exp()  # exp keeps its result for backward
        if known in ("", "by a view", "as a buffer"):
            real = real.detach().clone()
        before, knows = real.detach().clone(), real[0] if known == "by a view" else weakref.ref(real)
        with torch.no_grad(), pytest.raises(AbsentError, match=r"layers\.0\.weight is written into a tensor of this"):
            evaluated(write, absent(), real)
        assert torch.equal(real, before)
        del knows


@pytest.mark.parametrize("learns", [False, True])
def test_intermediate_tensors_become_absent_by_writes(learns: bool) -> None:
    for write in cells(INTO_INTERMEDIATE):
        real: Tensor = nn.Linear(6, 6)(torch.randn(8, 6)) if learns else torch.randn(8, 6)
        evaluated(write, absent(), real)
        assert isinstance(real, Absent)
        assert real.requires_grad == learns
        with pytest.raises(AbsentError, match=r"layers\.0\.weight is read"):
            (real * 2).sum().item()


def test_operations_give_absent_tensors_of_the_same_shape() -> None:
    for cell in cells(ABSORBED):
        real = torch.randn(8, 6)
        result = evaluated(cell, absent(), real)
        assert isinstance(result, Absent), cell
        assert result.shape == evaluated(cell, torch.randn(8, 6), real).shape, cell
        assert type(real) is Tensor, cell


def test_absent_tensors_have_shapes_and_give_absent_gradients() -> None:
    one = absent(learns=True, parameter=True)
    assert isinstance(one, nn.Parameter)
    assert (one.shape, one.dtype, one.device, one.requires_grad) == (torch.Size([8, 6]), torch.float32, HOST, True)
    assert not isinstance(torch.zeros_like(one), Absent)
    assert torch.equal(one.new_ones(2), torch.ones(2))
    twin = copy.deepcopy(one)
    assert isinstance(twin, Absent)
    assert isinstance(twin, nn.Parameter)
    real = torch.randn(8, 6, requires_grad=True)
    (gradient,) = torch.autograd.grad((absent() * real).sum(), real)
    assert isinstance(gradient, Absent)
