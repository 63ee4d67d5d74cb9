"""Which elements of a full tensor a rank holds, and which ranks hold the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.techniques.tools.holders import holders_of
from lightning_parallel.techniques.tools.shards import (
    ElementsShard,
    boxes,
    dtensor_of,
    shard_of,
    whole_tensor,
)
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
def test_boxes_place_the_elements_of_a_rank(layout: str) -> None:
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
    assert boxes(WHOLE) == [((slice(0, 7), slice(0, 12)), (0, 0))]
    assert boxes(torch.tensor(3.0)) == [((), ())]


@ranks(4)
def test_shards_are_gathered_as_they_were_cut() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    whole = torch.arange(5 * 8.0).view(5, 8)
    fused = ElementsShard(1, [((0, 2), (4, 5), (6, 7)), ((2, 4), (5, 6), (7, 8))])
    choices: list[Placement] = [Shard(0), Shard(1), Replicate()]
    for placements in itertools.product(choices, [*choices, fused]):
        shape = dtensor_of(whole.new_empty(0), mesh, placements, whole.shape, whole.stride())
        assert torch.equal(whole_tensor(shard_of(whole, shape)), whole), placements


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
        mesh.tokens(divided=False)
        assert len(dist.distributed_c10d._world.pg_map) == made
