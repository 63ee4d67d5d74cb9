"""The mesh makes the groups that are used, and no more: each costs threads, and all ranks wait for it to be made."""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel import ParallelMesh
from lightning_parallel.mesh import AXES
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
