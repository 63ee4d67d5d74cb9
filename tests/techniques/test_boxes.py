"""Which elements of a whole a rank holds, and who holds the same: the truths from which the rest follows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_parallel.mesh import ParallelMesh, resolve_sizes
from lightning_parallel.techniques.data_parallel import DataParallel
from lightning_parallel.techniques.gradients.average import average_gradients
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.tools.holders import holders_of
from lightning_parallel.techniques.tools.shards import (
    ElementsShard,
    as_shard,
    boxes,
    divided_again,
    dtensor_of,
    shard_of,
    whole_tensor,
)
from lightning_parallel.techniques.zero import Zero
from lightning_parallel.techniques.zero.states import ShardedStatesStep
from tests.ranks import ranks

SIZES = {"a": 2, "b": 3}
WHOLE = torch.arange(7 * 12.0).view(7, 12)

FUSED = ElementsShard(1, [((0, 2), (6, 7), (9, 10)), ((2, 4), (7, 8), (10, 11)), ((4, 6), (8, 9), (11, 12))])
LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[Placement, ...]]] = {
    "rows": (("b",), (Shard(0),)),
    "columns": (("b",), (Shard(1),)),
    "both dimensions": (("a", "b"), (Shard(0), Shard(1))),
    "copies of columns": (("a", "b"), (Replicate(), Shard(1))),
    "columns twice": (("a", "b"), (Shard(1), Shard(1))),
    "fused columns": (("b",), (FUSED,)),
    "rows of fused columns": (("a", "b"), (Shard(0), FUSED)),
    "fused columns twice": (("a", "b"), (Shard(1), FUSED)),
}


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def like(names: Sequence[str], placements: Sequence[Placement], whole: Tensor = WHOLE) -> DTensor:
    mesh = init_device_mesh("cpu", tuple(SIZES[name] for name in names), mesh_dim_names=tuple(names))
    return dtensor_of(whole.new_empty(0), mesh, placements, whole.shape, whole.stride())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_boxes_say_where_what_a_rank_holds_lies_in_the_whole(layout: str) -> None:
    names, placements = LAYOUTS[layout]
    size = 2 if names == ("a",) else 3 if names == ("b",) else 6
    counted = torch.zeros_like(WHOLE)
    for rank in range(size):
        with as_rank(rank, size):
            part = shard_of(WHOLE, like(names, placements))
            held = part.to_local()
            covered = torch.zeros_like(held)
            for here, offset in boxes(part):
                there = tuple(slice(o, o + s.stop - s.start) for o, s in zip(offset, here, strict=True))
                assert torch.equal(held[here], WHOLE[there])
                counted[there] += 1
                covered[here] += 1
            assert bool((covered == 1).all())
    copies = 2 if placements[0].is_replicate() else 1
    assert bool((counted == copies).all())


def test_plain_tensor_is_one_box() -> None:
    assert boxes(WHOLE) == [((slice(0, 7), slice(0, 12)), (0, 0))]
    assert boxes(torch.tensor(3.0)) == [((), ())]


def test_rows_of_a_fused_weight() -> None:
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        whole = torch.arange(8.0).view(8, 1)
        part = shard_of(
            whole,
            dtensor_of(
                whole.new_empty(0),
                mesh,
                [ElementsShard(0, [[(0, 2), (4, 5), (6, 7)], [(2, 4), (5, 6), (7, 8)]])],
                whole.shape,
                (1, 1),
            ),
        )
        rows = [(offset[0], offset[0] + here[0].stop - here[0].start) for here, offset in boxes(part)]
    assert rows == [(2, 4), (5, 6), (7, 8)]


def test_what_two_axes_divide_is_divided_again() -> None:
    """An expert that `ep` and `tp` divide, and of whose part ZeRO gives each rank some rows."""
    for rank in range(8):
        with as_rank(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_shard", "ep", "tp"))
            whole = torch.arange(32.0).view(8, 4)
            expert = shard_of(whole, dtensor_of(whole[:0], mesh["ep", "tp"], [Shard(0), Shard(1)], whole.shape, (4, 1)))
            own = expert.to_local()
            rows = own[rank // 4 * 2 : rank // 4 * 2 + 2]
            again = divided_again(rows, mesh["dp_shard"], expert)
            ((here, offset),) = boxes(again)
            assert torch.equal(rows, whole[offset[0] : offset[0] + 2, offset[1] : offset[1] + 2])
            assert here == (slice(0, 2), slice(0, 2))


@ranks(4)
def test_gathering_takes_cutting_back() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    whole = torch.arange(5 * 8.0).view(5, 8)
    choices: list[Placement] = [
        Shard(0),
        Shard(1),
        Replicate(),
        ElementsShard(1, [((0, 2), (4, 5), (6, 7)), ((2, 4), (5, 6), (7, 8))]),
    ]
    for placements in itertools.product(choices[:3], choices):
        shape = dtensor_of(whole.new_empty(0), mesh, placements, whole.shape, whole.stride())
        assert torch.equal(whole_tensor(shard_of(whole, shape)), whole), placements


# ---------------------------------------------------------------- holders


def experts_of(mesh: ParallelMesh) -> nn.Parameter:
    """Four experts, of which neighbours on `ep` hold two each."""
    own = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replicas", "ep"))
    whole = torch.arange(8.0).view(4, 2)
    layout = dtensor_of(whole.new_empty(0), own, [Replicate(), Shard(0)], whole.shape, whole.stride())
    return nn.Parameter(shard_of(whole, layout))


@ranks(4)
def test_gradients_are_summed_over_the_ranks_that_hold_them() -> None:
    mesh = ParallelMesh(resolve_sizes([DataParallel(4).claim], 4), "cpu")
    experts, shared = experts_of(mesh), nn.Parameter(torch.zeros(3))
    assert holders_of(shared, mesh).all.size() == 4
    assert holders_of(experts, mesh).all.size() == 2
    step = average_gradients(Step(), [experts, shared], mesh)
    rank = dist.get_rank()

    def backward() -> None:
        experts.grad = as_shard(torch.full((2, 2), float(rank)), experts)
        shared.grad = torch.full((3,), float(rank))

    step.backward(backward)
    step.close()
    same = [rank % 2, rank % 2 + 2]
    assert experts.grad is not None
    assert experts.grad.to_local().tolist() == [[sum(same) / 4] * 2] * 2
    assert shared.grad is not None
    assert shared.grad.tolist() == [6 / 4] * 3


@ranks(4)
def test_zero_shards_what_fewer_ranks_hold_among_them() -> None:
    mesh = ParallelMesh(resolve_sizes([Zero(4, stage=2).claim], 4), "cpu")
    experts, shared = experts_of(mesh), nn.Parameter(torch.zeros(4, 1))
    step = ShardedStatesStep(Step(), [experts, shared], mesh, 2, offload=False)
    rank = dist.get_rank()
    stored = step.stored(experts)
    assert isinstance(stored, DTensor)
    ((_, offset),) = boxes(stored)
    assert offset == (2 * (rank % 2) + rank // 2, 0)
    assert stored.to_local().flatten().tolist() == [2.0 * offset[0], 2.0 * offset[0] + 1]

    def backward() -> None:
        experts.grad = as_shard(torch.full((2, 2), float(rank)), experts)
        shared.grad = torch.full((4, 1), float(rank))

    step.backward(backward)
    gradient = experts.grad
    assert isinstance(gradient, DTensor)
    assert gradient.to_local().flatten().tolist() == [(rank % 2 + rank % 2 + 2) / 4] * 2
    stored.to_local().add_(100.0)
    step.after_optimizer_step([experts])
    expected = torch.arange(8.0).view(4, 2)[2 * (rank % 2) : 2 * (rank % 2) + 2] + 100
    assert isinstance(experts.data, DTensor)
    assert torch.equal(experts.data.to_local(), expected)
    step.close()


@pytest.mark.parametrize(
    "sizes",
    [
        {"pp": 2, "dp_replicate": 2, "dp_shard": 4, "cp": 1, "tp": 1},  # copies of experts, of which each is sharded
        {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2},
    ],
)
def test_groups_of_experts_are_made_on_ranks_without_experts(sizes: dict[str, int]) -> None:
    """A stage of a pipeline may have none, and to make a group is a collective."""
    with as_rank(0, 16):
        mesh = ParallelMesh(sizes, "cpu")
        view = mesh.experts(2)
        made = len(dist.distributed_c10d._world.pg_map)
        copies = [name for name in ("ep_replicate", "ep_shard") if view[name].size() > 1] or ["ep_shard"]
        kept, placements = view[(*copies, "ep")], [Replicate()] * len(copies)
        part = DTensor.from_local(torch.zeros(4, 3), kept, [*placements, Shard(0)], run_check=False)
        holders_of(nn.Parameter(part), mesh)
        mesh.tokens(divided=False)
        assert len(dist.distributed_c10d._world.pg_map) == made
