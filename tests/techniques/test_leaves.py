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


def test_its_gradient_moves_to_the_parameter_and_adds_up() -> None:
    divided = parameter()
    for times in (1, 2):
        leaf_of(divided).sum().backward()
        assert isinstance(divided.grad, DTensor)
        assert divided.grad.to_local().tolist() == [[float(times)] * 3] * 2


def test_models_do_not_take_each_others_leaves_away() -> None:
    """A run that ends lets go of its own; another model's graph that is under way still reaches its parameters."""
    mine, other = parameter(), parameter()
    under_way = leaf_of(mine).sum()
    leaf_of(other).sum().backward()
    del other
    gc.collect()
    under_way.backward()
    assert isinstance(mine.grad, DTensor)


def test_nothing_holds_the_memory_of_a_parameter_that_is_gone() -> None:
    divided = parameter()
    leaf_of(divided).sum().backward()
    leaf = weakref.ref(leaf_of(divided))
    del divided
    gc.collect()
    assert leaf() is None


def test_parameter_with_one_is_moved_with_its_module() -> None:
    module = nn.Linear(3, 4)
    module.weight = parameter()
    leaf_of(module.weight).sum().backward()
    module.to(torch.float64)
    assert module.weight.dtype == torch.float64


def test_copied_parameter_makes_one_of_its_own() -> None:
    divided = parameter()
    leaf_of(divided).sum().backward()
    twin = copy.deepcopy(divided)
    (2 * leaf_of(twin)).sum().backward()
    assert divided.grad is not None
    assert divided.grad.to_local().tolist() == [[1.0] * 3] * 2
    torch.save(dict(vars(divided)), io.BytesIO())
