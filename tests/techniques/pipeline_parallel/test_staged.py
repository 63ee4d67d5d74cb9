"""Staged tensors: what user code does with parameters of stages between steps is as on one device."""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.techniques.tools.staged import (
    Home,
    StageRanks,
    ValueInStepError,
    full,
    hollow,
    stage,
    unstage,
)
from tests.ranks import ranks
from tests.techniques.tools.parameter_uses import USES, faults_of_cells, faults_of_uses, net

CPU = torch.device("cpu")


def pipeline() -> StageRanks:
    return StageRanks(dist.group.WORLD, CPU, dist.get_rank())


def staged(value: Tensor, gradient: Tensor | None, home: Home) -> nn.Parameter:
    """The parameter with its gradient: a copy where it is held, else on meta."""

    def kept(tensor: Tensor) -> Tensor:
        return tensor.detach().clone() if home.here else hollow(tensor, CPU)

    made = nn.Parameter(kept(value))
    if gradient is not None:
        made.grad = stage(kept(gradient), home)
    return stage(made, home)


def net_of_two_stages() -> Any:
    among, made = pipeline(), net()
    for name, parameter in list(made.named_parameters()):
        number, key = name.split(".")
        home = among.home([int(int(number) == 3)])
        made[int(number)]._parameters[key] = staged(parameter, parameter.grad, home)
    among.tensors = list(made.parameters())
    return made


@ranks(2)
def test_operations_on_staged_tensors_are_those_of_one_device() -> None:
    for holders in ((1,), (0, 1)):
        home = pipeline().home(holders)
        found = faults_of_cells(lambda *values, home=home: staged(*values, home), full)
        assert not found, (holders, found)
    found = faults_of_uses(net_of_two_stages, USES, full)
    assert not found, found


@ranks(2)
def test_staged_tensors_keep_identity_gradients_and_errors() -> None:
    among = pipeline()
    first = among.home([0])
    weight = nn.Parameter(torch.ones(2, 2))
    assert stage(weight, first) is weight
    assert isinstance(weight, nn.Parameter)
    unstage(weight)
    assert type(weight) is nn.Parameter
    assert vars(weight) == {}

    among = pipeline()
    weights = [staged(torch.ones(2, 3), None, among.home([k])) for k in (0, 1, 1)]
    among.tensors, among.knows_gradients = weights, False
    if dist.get_rank() == 1:  # as the backward of a step leaves them
        unstage(weights[1]).grad = torch.ones(2, 3)
        stage(weights[1], among.home([1]))
    assert [w.grad is None for w in weights] == [True, False, True]
    assert weights[1].grad.sum().item() == 6.0
    with torch._C.DisableTorchFunctionSubclass():  # what this rank has of it
        assert weights[1].grad is not None

    weight, file = staged(torch.arange(4.0), None, pipeline().home([1])), io.BytesIO()
    torch.save({"weight": weight, "ema": weight.detach() * 2}, file)
    file.seek(0)
    read = torch.load(file)
    assert type(read["weight"]) is nn.Parameter
    assert read["ema"].tolist() == [0.0, 2.0, 4.0, 6.0]
    check_errors()


def check_errors() -> None:
    """An error of the holder is raised on all ranks; one that nobody has read, when the step begins."""
    among = pipeline()
    kept = staged(torch.ones(2), None, among.home([0])).detach().clone()
    among.exposed = False
    with pytest.raises(ValueInStepError, match="on_train_batch_start"):
        kept.sum()
    weight = staged(torch.zeros(3, 3), None, pipeline().home([1]))
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.inv(weight).sum().item()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="shape"):
        weight.data = torch.zeros(2)
    with torch.no_grad():
        weight.copy_(torch.linalg.inv(weight))
    if dist.get_rank() == 1:
        with pytest.raises(torch.linalg.LinAlgError):
            unstage(weight)
