"""Staged tensors: what user code does with parameters of stages between steps is as on one device."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.techniques.tools.staged import (
    StageRanks,
    ValueInStepError,
    full,
    hollow,
    own_gradient,
    stage,
    unstage,
)
from tests.ranks import ranks
from tests.techniques.parameter_operations import READS, WRITES
from tests.techniques.staged_uses import USES

CPU = torch.device("cpu")


def _pipeline():
    return StageRanks(dist.group.WORLD, CPU, dist.get_rank())


def _staged(parameter, home):
    """The parameter with its gradient: a copy where it is held, else on meta."""
    held = home.here
    made = nn.Parameter(parameter.detach().clone() if held else hollow(parameter, CPU))
    if parameter.grad is not None:
        made.grad = stage(parameter.grad.clone() if held else hollow(parameter, CPU), home)
    return stage(made, home)


def _numbers(value):
    """A result as one tensor of numbers, whatever it is made of."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return torch.cat([_numbers(each).flatten() for each in value]) if value else torch.zeros(0)
    if isinstance(value, str):
        return torch.tensor([float(value)])
    return torch.as_tensor(0.0 if value is None else full(value)).detach().double()


def _state(parameters):
    return [[full(p).detach(), 0.0 if p.grad is None else full(p.grad)] for p in parameters]


def _differs(got, wanted):
    got, wanted = _numbers(got), _numbers(wanted)
    return got.shape != wanted.shape or not torch.allclose(got, wanted, atol=1e-5, equal_nan=True)


def _fault(run, staged, plain, parameters_of, compares):
    """Why a use of staged parameters is not as that of plain ones; empty if it is."""
    torch.manual_seed(5)
    try:
        got = run(staged)
        state = torch.get_rng_state()
        got = _numbers(got) if compares else None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    torch.manual_seed(5)
    wanted = run(plain)
    if not torch.equal(state, torch.get_rng_state()):
        return "random state"
    if compares and _differs(got, wanted):
        return f"returned {got}, not {_numbers(wanted)}"
    return "state" if _differs(_state(parameters_of(staged)), _state(parameters_of(plain))) else ""


@pytest.mark.parametrize("holders", [(0,), (1,), (0, 1)], ids=["first", "last", "tied"])
@pytest.mark.parametrize("table", [READS, WRITES], ids=["reads", "writes"])
@ranks(2)
def test_every_operation_is_as_on_one_device(table, holders):
    home = _pipeline().home(holders)
    faults = {}
    for name, run in table.items():
        torch.manual_seed(0)
        plain = nn.Parameter(torch.randn(8, 6))
        plain.grad = torch.randn(8, 6)
        with torch.set_grad_enabled(table is READS):
            fault = _fault(run, _staged(plain, home), plain, lambda p: [p], compares=table is READS)
        if fault:
            faults[name] = fault
    assert faults == {}


def _net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5))
    net(torch.randint(0, 7, (4, 3))).pow(2).mean().backward()
    return net


def _net_of_two_stages(net):
    pipeline, made = _pipeline(), copy.deepcopy(net)
    for name, parameter in net.named_parameters():
        number, key = name.split(".")
        made[int(number)]._parameters[key] = _staged(parameter, pipeline.home([int(int(number) == 3)]))
    pipeline.tensors = list(made.parameters())
    return made


@ranks(2)
def test_every_use_is_as_on_one_device():
    faults = {}
    for name, run in USES.items():
        net = _net()
        fault = _fault(run, _net_of_two_stages(net), net, lambda net: list(net.parameters()), compares=True)
        if fault:
            faults[name] = fault
    assert faults == {}


@ranks(2)
def test_error_of_the_holder_is_raised_on_all_ranks():
    weight = _staged(nn.Parameter(torch.zeros(3, 3)), _pipeline().home([1]))
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.inv(weight).sum().item()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="shape"):
        weight.data = torch.zeros(2)


@ranks(2)
def test_error_nobody_has_read_is_raised_when_the_step_begins():
    weight = _staged(nn.Parameter(torch.zeros(3, 3)), _pipeline().home([1]))
    with torch.no_grad():
        weight.copy_(torch.linalg.inv(weight))
    if dist.get_rank() == 1:
        with pytest.raises(torch.linalg.LinAlgError):
            unstage(weight)


@ranks(2)
def test_step_cannot_use_what_is_kept_from_between_steps():
    pipeline = _pipeline()
    kept = _staged(nn.Parameter(torch.ones(2)), pipeline.home([0])).detach().clone()
    pipeline.exposed = False
    with pytest.raises(ValueInStepError, match="on_train_batch_start"):
        kept.sum()


@ranks(2)
def test_parameter_stays_the_same_object():
    home = _pipeline().home([0])
    weight = nn.Parameter(torch.ones(2, 2))
    staged = stage(weight, home)
    assert staged is weight
    assert isinstance(staged, nn.Parameter)
    unstage(weight)
    assert type(weight) is nn.Parameter
    assert vars(weight) == {}


@ranks(2)
def test_gradients_are_there_where_the_holder_has_one():
    pipeline = _pipeline()
    weights = [_staged(nn.Parameter(torch.ones(2, 3)), pipeline.home([k])) for k in (0, 1, 1)]
    pipeline.tensors, pipeline.knows_gradients = weights, False
    if dist.get_rank() == 1:  # as the backward of a step leaves them
        vars(weights[1])
        unstage(weights[1]).grad = torch.ones(2, 3)
        stage(weights[1], pipeline.home([1]))
    assert [w.grad is None for w in weights] == [True, False, True]
    assert weights[1].grad.sum().item() == 6.0
    assert own_gradient(weights[1]) is not None


@ranks(2)
def test_saved_values_are_plain():
    weight = _staged(nn.Parameter(torch.arange(4.0)), _pipeline().home([1]))
    file = io.BytesIO()
    torch.save({"weight": weight, "ema": weight.detach() * 2}, file)
    file.seek(0)
    read = torch.load(file)
    assert type(read["weight"]) is nn.Parameter
    assert read["ema"].tolist() == [0.0, 2.0, 4.0, 6.0]
