"""The plain part of a divided parameter, with which a rank computes."""

import copy
import gc
import io
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_parallel.techniques.pipeline_parallel.gradients import ApplyPrecomputedGrads
from lightning_parallel.techniques.tools.leaves import leaf_of
from lightning_parallel.techniques.tools.shards import dtensor_of


@pytest.fixture(autouse=True)
def one_of_two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def parameter() -> nn.Parameter:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return nn.Parameter(dtensor_of(torch.ones(2, 3), mesh, [Shard(0)], torch.Size((4, 3)), (3, 1)))


def gradient_of(divided: nn.Parameter) -> list[list[float]]:
    assert isinstance(divided.grad, DTensor)
    return divided.grad.to_local().tolist()


def test_gradient_of_a_leaf_adds_up_in_its_parameter() -> None:
    """Also where leaves of another model end while the graph of this one is under way."""
    divided, other = parameter(), parameter()
    for times in (1, 2):
        under_way = leaf_of(divided).sum()
        leaf_of(other).sum().backward()
        other = parameter()
        gc.collect()
        under_way.backward()
        assert gradient_of(divided) == [[float(times)] * 3] * 2


def test_leaf_goes_moves_and_is_copied_with_its_parameter() -> None:
    module = nn.Linear(3, 4)
    module.weight = divided = parameter()
    leaf_of(divided).sum().backward()
    twin = copy.deepcopy(divided)
    (2 * leaf_of(twin)).sum().backward()
    assert gradient_of(divided) == [[1.0] * 3] * 2
    torch.save(dict(vars(divided)), io.BytesIO())
    module.to(torch.float64)
    assert module.weight.dtype == torch.float64
    leaf = weakref.ref(leaf_of(twin))
    del twin
    gc.collect()
    assert leaf() is None


def test_parameter_that_no_step_used_gets_no_gradient() -> None:
    unused, used = parameter(), parameter()
    always, gradients = torch.zeros((), requires_grad=True), [None, torch.full((2, 3), 3.0)]
    leaves = [leaf_of(unused), leaf_of(used)]
    ApplyPrecomputedGrads.apply(torch.ones(()), gradients, 1.0, always, *leaves).backward()
    assert unused.grad is None
    assert gradient_of(used) == [[3.0] * 3] * 2
