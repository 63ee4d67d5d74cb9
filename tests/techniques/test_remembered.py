"""What rules decided is remembered, and what decides otherwise is not taken for the same."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided import rules, table  # noqa: F401
from lightning_parallel.techniques.divided.table import Form, LocalCall
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import ranks
from tests.techniques.test_wire import world

assert world  # a fixture


def two_ranks() -> Ranks:
    return Ranks(dist.group.WORLD, "tp")


def values(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) / 7


def halves(among: Ranks, whole: Tensor, dim: int) -> Divided:
    elements = among.chunks(whole.shape[dim])
    return Divided(elements.take(whole, dim).contiguous(), {dim: elements})


@ranks(2)
def test_forms_and_elements_are_one_object_for_the_same() -> None:
    among = two_ranks()
    one, other = halves(among, values(2, 8), 1), halves(among, values(2, 8) + 1, 1)
    assert one.form is other.form
    assert among.elements(8, [[(0, 4)], [(4, 8)]]) is among.elements(8, [[(0, 4)], [(4, 8)]])
    assert one.form is not halves(among, values(2, 8), 0).form
    assert one.form is not halves(two_ranks(), values(2, 8), 1).form


@ranks(2)
def test_a_rule_is_asked_once_for_tensors_of_the_same_forms() -> None:
    among, asked = two_ranks(), []
    before = table.RULES[F.gelu]
    table.RULES[F.gelu] = lambda *call: asked.append(call) or before(*call)
    try:
        for number in range(3):
            whole = values(2, 8) + number
            assert torch.equal(F.gelu(halves(among, whole, 1)).whole(), F.gelu(whole))
        F.gelu(halves(among, values(2, 8), 1), approximate="tanh")
        F.gelu(halves(among, values(2, 8), 0))
    finally:
        table.RULES[F.gelu] = before
    assert len(asked) == 3


@ranks(2)
def test_what_begins_to_learn_is_not_taken_for_what_did_not() -> None:
    """A plain factor that learns enters: its gradient is the sum of what ranks have computed."""
    among, whole = two_ranks(), values(2, 8)
    factor = torch.tensor([[2.0], [3.0]])
    for learns in (False, True, False):
        factor.requires_grad_(learns)
        factor.grad = None
        made = halves(among, whole, 1) * factor
        assert torch.equal(made.whole(), whole * factor)
        if learns:
            made.sum().backward()
            assert torch.allclose(factor.grad, whole.sum(1, keepdim=True))


@ranks(2)
def test_what_was_decided_without_gradients_holds_for_nothing_with_them() -> None:
    among, whole = two_ranks(), values(2, 8)
    factor = torch.tensor([[2.0], [3.0]], requires_grad=True)
    with torch.no_grad():
        halves(among, whole, 1) * factor
    (halves(among, whole, 1) * factor).sum().backward()
    assert torch.allclose(factor.grad, whole.sum(1, keepdim=True))


@ranks(2)
def test_numbers_that_are_equal_but_of_other_kinds_are_others() -> None:
    tensor = halves(two_ranks(), torch.arange(16).view(2, 8), 1)
    assert (tensor * 1).dtype == torch.int64
    assert (tensor * 1.0).dtype == torch.float32
    tensor.view(2, 8, 1)
    with pytest.raises(TypeError):
        tensor.view(2.0, 8, 1)


@ranks(2)
def test_plain_tensors_of_other_shapes_meet_anew() -> None:
    among, whole = two_ranks(), values(2, 8)
    for other in (values(2, 1), values(8), values(2, 8), values(1, 1), values(2, 1)):
        made = halves(among, whole, 1) + other
        assert torch.equal(made.whole(), whole + other)


def parameter(name: str, value: Tensor) -> Any:
    made: Any = nn.Parameter(value)
    made._replicated_path = name
    return made


@ranks(2)
def test_the_mean_of_gradients_of_parameters_is_right_every_time() -> None:
    among, weight, bias = two_ranks(), parameter("weight", values(4) + 1), parameter("bias", values(4))
    whole = values(2, 6, 4)
    for _ in range(3):
        among.reduces_later = True
        weight.grad = bias.grad = None
        F.layer_norm(halves(among, whole, 1), (4,), weight, bias).sum().backward()
        gradients = [each.grad.clone() for each in (weight, bias)]
        assert set(among.met) == {"weight", "bias"}
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= 2
        expected = torch.autograd.grad(F.layer_norm(whole, (4,), weight, bias).sum(), [weight, bias])
        for gradient, by_one in zip(gradients, expected, strict=True):
            assert torch.allclose(gradient, by_one, atol=1e-6)


@ranks(2)
def test_in_a_backward_of_the_users_own_gradients_are_summed_at_once() -> None:
    among, weight, whole = two_ranks(), parameter("weight", values(4) + 1), values(2, 6, 4)
    (gradient,) = torch.autograd.grad((halves(among, whole, 1) * weight).sum(), weight)
    assert torch.allclose(gradient, whole.sum((0, 1)))


@ranks(2)
def test_numbers_that_change_with_every_step_are_forgotten() -> None:
    tensor = halves(two_ranks(), values(2, 8), 1)
    for number in range(table.KEPT + 10):
        tensor * (number + 0.5)
    assert len(tensor.form.calls) <= table.KEPT
    assert torch.equal((tensor * 3.5).own, tensor.own * 3.5)


def test_a_form_is_told_from_others_by_what_it_is() -> None:
    one, other = Form(torch.Size((2,)), {}, (1,)), Form(torch.Size((2,)), {}, (1,))
    one.remember("key", LocalCall(torch.neg, None))
    assert "key" in one.calls
    assert not other.calls
