"""The mesh makes the groups that are used, and no more: each costs threads, and all ranks wait for it to be made."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel import ParallelMesh
from lightning_parallel.mesh import AXES
from tests.ranks import run_on_ranks

GROUPS = [({"dp_replicate": 4}, 1), ({"dp_shard": 2, "tp": 2}, 3), ({"pp": 2, "dp_replicate": 2, "dp_shard": 2}, 5)]
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


@pytest.mark.parametrize(("sizes", "groups"), GROUPS)
def test_axes_of_one_rank_share_a_group(sizes: dict[str, int], groups: int) -> None:
    world = torch.arange(torch.tensor(list(sizes.values())).prod())
    grid = (world + 1).view([sizes.get(axis, 1) for axis in AXES])
    for rank, (count, sums, sizes_seen) in enumerate(run_on_ranks(len(world), made, sizes)):
        assert count == groups
        assert sizes_seen.tolist() == [sizes.get(axis, 1) for axis in AXES]
        expected = [grid.sum(dim, keepdim=True).expand_as(grid).flatten()[rank] for dim in range(len(AXES))]
        assert sums.tolist() == [int(each) for each in expected]
