"""Operations on shards that compute as the full tensor, and what libraries do with them."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_parallel.techniques.tools.global_shard import GlobalShard, as_global_shard, gather_full
from lightning_parallel.techniques.tools.shards import ElementsShard, make_dtensor, shard_of
from tests.ranks import ranks, run_on_ranks
from tests.techniques.tools.parameter_uses import OF_SHARDS, USES, differ, faults_of_cells, faults_of_uses, net

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")


def cut(tensor: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """Cut `dim`; on two axes as ZeRO 3 over tensor parallel does: over `tp`, and then the rows over `dp`."""
    if mesh.ndim == 1:
        return distribute_tensor(tensor, mesh, [Shard(dim)])
    module = nn.Module()
    module.p = nn.Parameter(distribute_tensor(tensor, mesh["tp"], [Shard(dim)]))
    fully_shard(module, mesh=mesh["dp"])
    return module.p.detach()


def full(value: Any) -> Any:
    return gather_full(value.detach()) if isinstance(value, DTensor) else value


def wrong_cells(n: int, rows: int, dim: int) -> dict[str, str]:
    axes = {2: ("tp",), 4: ("dp", "tp")}[n]
    mesh = init_device_mesh("cpu", (2,) * len(axes), mesh_dim_names=axes)

    def make(value: Tensor, gradient: Tensor) -> nn.Parameter:
        p = nn.Parameter(cut(value, mesh, dim))
        p.grad = cut(gradient, mesh, dim)
        as_global_shard(p)
        return p

    return faults_of_cells(make, full, rows)


@pytest.mark.parametrize(
    ("n", "rows", "dim"), [(2, 5, 0), (4, 8, 1), *(pytest.param(2, 8, d, marks=pytest.mark.exhaustive) for d in (0, 1))]
)
def test_operations_compute_as_the_full_tensor(n: int, rows: int, dim: int) -> None:
    assert run_on_ranks(n, wrong_cells, n, rows, dim) == [{}] * n


def sharded_net() -> Any:
    made, mesh = net(), init_device_mesh("cpu", (2,))
    for module in made.modules():
        for name, parameter in list(module._parameters.items()):
            shard = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            shard.grad = distribute_tensor(parameter.grad, mesh, [Shard(0)])
            module._parameters[name] = shard
    for parameter in made.parameters():
        as_global_shard(parameter)
    return made


@ranks(2)
def test_libraries_and_views_find_what_one_process_has() -> None:
    assert faults_of_uses(sharded_net, USES | OF_SHARDS, full) == {}
    check_odd_shards()
    check_views()


def check_odd_shards() -> None:
    """Ranks without elements, and elements in several pieces."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    pieces = ElementsShard(0, [((0, 1), (2, 3)), ((1, 2), (3, 4))])
    like = make_dtensor(torch.empty(0), mesh, [pieces], whole)
    for value, shard in (
        (whole, shard_of(whole, like)),
        (whole[:1], distribute_tensor(whole[:1].clone(), mesh, [Shard(0)])),
    ):
        p: Any = as_global_shard(nn.Parameter(shard))
        for read in ("sum", "mean", "max", "min", "norm", "prod", "abs", "std"):
            assert not differ(getattr(p, read)(), getattr(value, read)(), full), read
        assert torch.equal(p[-1], value[-1])
        with torch.no_grad():
            p[0] = 3.0
        assert gather_full(p.detach())[0].tolist() == [3.0] * 3


def check_views() -> None:
    """A view writes through and raises once it is stale; a copy of a shard is one; a saved one is plain."""
    mesh = init_device_mesh("cpu", (2,))
    p: Any = as_global_shard(nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])))
    with torch.no_grad():
        row, numbers = p[3], p.detach().numpy()
        row.mul_(5.0)
        assert p.sum() == 16.0
        p.mul_(2.0)
    with pytest.raises(RuntimeError, match="after the tensor has changed"):
        row.sum()
    with pytest.raises(ValueError, match="read-only"):
        numbers[0] = 1
    with pytest.raises(RuntimeError, match=r"\.data is set to a tensor of shape \(3,\)"):
        p.data = torch.ones(3)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        p[0] = 1.0
    assert "ones" not in repr(p)
    assert type(copy.deepcopy(p)) is GlobalShard
    buffer = io.BytesIO()
    torch.save(p, buffer)
    buffer.seek(0)
    assert torch.load(buffer)[3].tolist() == [10.0, 10.0]
