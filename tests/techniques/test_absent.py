"""Tensors that another stage holds: operations absorb them, and their values cannot be read or written."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.techniques.tools.absent import Absent, AbsentError

HOST = torch.device("cpu")


def absent(learns: bool = False, parameter: bool = False) -> Absent:
    return Absent(torch.empty(8, 6), HOST, "layers.0.weight", learns=learns, parameter=parameter)


READS: dict[str, Callable[[Absent], Any]] = {
    "item": lambda a: a.sum().item(),
    "float": lambda a: float(a.mean()),
    "bool": lambda a: bool((a > 0).any()),
    "tolist": lambda a: a.tolist(),
    "numpy": lambda a: a.numpy(),
    "asarray": lambda a: numpy.asarray(a),
    "format": lambda a: f"{a.sum():.2f}",
    "equal": lambda a: torch.equal(a, torch.zeros(8, 6)),
    "allclose": lambda a: torch.allclose(a, torch.zeros(8, 6)),
    "nonzero": lambda a: a.nonzero(),
    "masked_select": lambda a: a.masked_select(torch.ones(8, 6, dtype=torch.bool)),
    "unique": lambda a: a.unique(),
    "iteration": lambda a: [float(row.sum()) for row in a],
    "index": lambda a: [1, 2, 3][a.argmax()],
    "data_ptr": lambda a: a.data_ptr(),
    "storage": lambda a: a.untyped_storage(),
    "pickle": lambda a: pickle.dumps(a),
}
INTO_INTERMEDIATE: dict[str, Callable[[Absent, Tensor], Any]] = {
    "add_": lambda a, r: r.add_(a),
    "iadd": lambda a, r: r.__iadd__(a),
    "copy_": lambda a, r: r.copy_(a),
    "setitem": lambda a, r: r.__setitem__(0, a[0]),
    "index_add_": lambda a, r: r.index_add_(0, torch.arange(8), a),
    "masked_fill_": lambda a, r: r.masked_fill_(torch.eye(8, 6, dtype=torch.bool), a.sum()),
}
"""Writes after which a tensor that nothing else knows is absent itself."""

WRITES: dict[str, Callable[[Absent, Tensor], Any]] = {
    "out": lambda a, r: torch.add(a, 1, out=r),
    "foreach": lambda a, r: torch._foreach_add_([r], [a]),
    "view": lambda a, r: r[2:4].mul_(a[2:4]),
    "batch_norm": lambda a, r: F.batch_norm(a, r[0], r[1].abs(), training=True),
}
ABSORBED: dict[str, Callable[[Absent, Tensor], Any]] = {
    "operators": lambda a, r: (a + r) * (r + a) / (r - a) ** (a @ r.T @ r),
    "map": lambda a, r: F.linear(r, a),
    "attention": lambda a, r: F.scaled_dot_product_attention(a[None], r[None], r[None]),
    "loss": lambda a, r: F.cross_entropy(a, torch.arange(8) % 6),
    "norm": lambda a, r: torch.linalg.vector_norm(a),
    "mask": lambda a, r: a[r > 0].sum(),
    "cat": lambda a, r: torch.cat([a, r]),
    "where": lambda a, r: torch.where(r > 0, a, r),
    "cast": lambda a, r: a.to(torch.bfloat16),
    "in place": lambda a, r: a.clone().mul_(r),
    "lstm": lambda a, r: nn.LSTM(6, 5)(a)[0],
    "fft": lambda a, r: torch.fft.rfft(a).abs(),
    "no rule for shapes": lambda a, r: torch.cdist(a, r),
    "a shape that changes in place": lambda a, r: torch.quantile(a, 0.9, dim=-1, keepdim=True),
    "view of data": lambda a, r: a.data.view(-1),
}


@pytest.mark.parametrize("read", READS)
def test_reads_raise(read: str) -> None:
    with pytest.raises(AbsentError, match=r"layers\.0\.weight is .*another stage of the pipeline has it"):
        READS[read](absent())


@pytest.mark.parametrize("write", WRITES)
def test_writes_into_tensors_with_values_raise(write: str) -> None:
    real = torch.randn(8, 6)
    before = real.clone()
    with pytest.raises(AbsentError, match=r"layers\.0\.weight is written into a tensor of this stage"):
        WRITES[write](absent(), real)
    assert torch.equal(real, before)


@pytest.mark.parametrize("write", INTO_INTERMEDIATE)
@pytest.mark.parametrize("learns", [False, True])
def test_intermediate_tensors_become_absent_by_writes(write: str, learns: bool) -> None:
    real: Tensor = nn.Linear(6, 6)(torch.randn(8, 6)) if learns else torch.randn(8, 6)
    INTO_INTERMEDIATE[write](absent(), real)
    assert isinstance(real, Absent)
    assert real.requires_grad == learns
    with pytest.raises(AbsentError, match=r"layers\.0\.weight is read"):
        (real * 2).sum().item()


@pytest.mark.parametrize("write", INTO_INTERMEDIATE)
@pytest.mark.parametrize("known", ["by a view", "by autograd", "as a buffer", "as a parameter"])
def test_writes_into_tensors_that_others_know_raise(write: str, known: str) -> None:
    weight = nn.Parameter(torch.randn(8, 6))
    real = weight if known == "as a parameter" else weight.exp()  # exp keeps its result for backward
    if known in ("by a view", "as a buffer"):
        real = real.detach().clone()
    before, knows = real.detach().clone(), real[0] if known == "by a view" else weakref.ref(real)
    with torch.no_grad(), pytest.raises(AbsentError, match=r"layers\.0\.weight is written into a tensor of this stage"):
        INTO_INTERMEDIATE[write](absent(), real)
    assert torch.equal(real, before)
    del knows


@pytest.mark.parametrize("operation", ABSORBED)
def test_operations_give_absent_tensors_of_the_same_shape(operation: str) -> None:
    real, run = torch.randn(8, 6), ABSORBED[operation]
    torch.manual_seed(0)
    result, expected = run(absent(), real), run(Absent(real, HOST, "a"), real)
    assert isinstance(result, Absent)
    assert isinstance(expected, Absent)
    if operation != "mask":  # nobody knows how many
        assert result.shape == F.linear(real, real).shape if operation == "map" else True
    assert result.shape == expected.shape
    assert type(real) is Tensor


def test_questions_about_shapes_have_answers() -> None:
    one = absent(learns=True, parameter=True)
    assert isinstance(one, nn.Parameter)
    assert (one.shape, one.dtype, one.device, one.requires_grad) == (torch.Size([8, 6]), torch.float32, HOST, True)
    assert not isinstance(torch.zeros_like(one), Absent)
    assert torch.equal(one.new_ones(2), torch.ones(2))
    twin = copy.deepcopy(one)
    assert isinstance(twin, Absent)
    assert isinstance(twin, nn.Parameter)


def test_gradients_of_operands_of_absent_tensors_are_absent() -> None:
    real = torch.randn(8, 6, requires_grad=True)
    (gradient,) = torch.autograd.grad((absent() * real).sum(), real)
    assert isinstance(gradient, Absent)
