"""The mesh makes the groups that are used, and no more: each costs threads, and all ranks wait for it to be made."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_parallel.mesh import AXES, ParallelMesh
from lightning_parallel.techniques.tools.holders import holders_of
from tests.ranks import run_on_ranks

SIZES, GROUPS = {"pp": 2, "dp_replicate": 2, "dp_shard": 2}, 5
"""The sizes of axes; and how many groups beside that of all ranks: of each used axis that is not all of them, of the
ranks that share batches, and one of this rank alone."""


def made(sizes: dict[str, int]) -> tuple[int, Tensor, Tensor]:
    mesh = ParallelMesh({**dict.fromkeys(AXES, 1), **sizes}, "cpu")
    groups = len(dist.distributed_c10d._world.pg_map) - 1
    sums = torch.stack([torch.tensor(dist.get_rank() + 1) for _ in AXES])
    gathered = torch.zeros(len(AXES), dtype=torch.long)
    for axis, number in zip(AXES, sums, strict=True):
        group = mesh[axis].get_group()
        dist.all_reduce(number, group=group)
        gathered[AXES.index(axis)] = dist.get_world_size(group)
    return groups, sums, gathered


def test_axes_of_one_rank_share_a_group() -> None:
    grid = torch.arange(1, 9).view([SIZES.get(axis, 1) for axis in AXES])
    for rank, (count, sums, sizes) in enumerate(run_on_ranks(8, made, SIZES)):
        assert count == GROUPS
        assert sizes.tolist() == [SIZES.get(axis, 1) for axis in AXES]
        expected = [grid.sum(dim, keepdim=True).expand_as(grid).flatten()[rank] for dim in range(len(AXES))]
        assert sums.tolist() == [int(each) for each in expected]


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "sizes",
    [
        {"pp": 2, "dp_replicate": 2, "dp_shard": 4, "cp": 1, "tp": 1},  # copies of experts, of which each is sharded
        {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2},
    ],
)
def test_groups_of_experts_exist_on_ranks_without_experts(sizes: dict[str, int]) -> None:
    """A stage of a pipeline may have none, and to make a group is a collective."""
    with as_rank(0, 16):
        mesh = ParallelMesh(sizes, "cpu")
        view = mesh.experts(2)
        made = len(dist.distributed_c10d._world.pg_map)
        copies = [name for name in ("ep_replicate", "ep_shard") if view[name].size() > 1] or ["ep_shard"]
        kept, placements = view[(*copies, "ep")], [Replicate()] * len(copies)
        part = DTensor.from_local(torch.zeros(4, 3), kept, [*placements, Shard(0)], run_check=False)
        holders_of(nn.Parameter(part), mesh)
        assert len(dist.distributed_c10d._world.pg_map) == made
