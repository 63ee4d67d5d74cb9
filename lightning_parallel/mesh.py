"""The mesh: one named grid of ranks on which every axis always exists, an unused one with size 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ContextDecorator
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")
Axis: TypeAlias = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
Size: TypeAlias = int | Literal["auto"]

AXES: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes from outermost to innermost: neighbours on `tp` communicate most, so their ranks are next to each other."""


@dataclass(frozen=True)
class Claim:
    """The axes that one technique asks for, and the technique's name for error messages."""

    owner: str
    axes: Mapping[Axis, Size]


def resolve_sizes(claims: Iterable[Claim], world_size: int) -> dict[Axis, int]:
    """Return the size of every axis for the axes that techniques ask for; called before any process group exists.

    Args:
        claims: the axes of each technique. At most one size may be "auto": it takes the ranks that no other axis uses.
        world_size: the number of all ranks.

    Raises:
        ValueError: an axis has two owners, a size is no positive integer, more than one size is "auto", or the product
            of the sizes is not `world_size`.
    """
    claims = list(claims)
    requested = _one_owner_per_axis(claims)
    auto_axes = [axis for axis, size in requested.items() if size == "auto"]
    if len(auto_axes) > 1:
        raise ValueError(f"{' and '.join(auto_axes)} are both 'auto', but only one can take the rest; fix the others")
    sizes: dict[Axis, int] = {axis: size for axis in AXES if (size := requested.get(axis, 1)) != "auto"}
    fixed = prod(sizes.values())
    if auto_axes:
        if world_size % fixed:
            raise ValueError(
                f"{_product(sizes)} = {fixed} does not divide the world of {world_size} ranks, so "
                f"{auto_axes[0]}='auto' has no whole size; choose sizes whose product divides {world_size}"
            )
        sizes[auto_axes[0]] = world_size // fixed
    elif fixed != world_size:
        claimed = {axis for claim in claims for axis in claim.axes}
        if not claimed:
            raise ValueError(
                f"the world has {world_size} ranks, but no technique uses more than one; "
                "add one, such as DataParallel(), or run on a single device"
            )
        fits_again = world_size % fixed == 0 and not claimed & {"dp_replicate", "dp_shard"}
        for_the_rest = f", or add DataParallel() for {world_size // fixed} replicas" if fits_again else ""
        raise ValueError(
            f"{_product(sizes)} needs {fixed} rank{'s' * (fixed > 1)}, but the world has {world_size}; "
            f"change one size, or leave it 'auto'{for_the_rest}"
        )
    return {axis: sizes[axis] for axis in AXES}


def _one_owner_per_axis(claims: Iterable[Claim]) -> dict[Axis, Size]:
    requested: dict[Axis, Size] = {}
    owners: dict[Axis, str] = {}
    for owner, axis, size in ((claim.owner, axis, size) for claim in claims for axis, size in claim.axes.items()):
        if axis not in AXES:
            raise ValueError(f"{owner} claims the axis {axis!r}; the axes are {', '.join(AXES)}")
        if axis in owners:
            hint = " (replicas of a sharded model are written Zero(shards, replicate=replicas))"
            raise ValueError(
                f"{owners[axis]} and {owner} both claim the axis {axis}, but an axis has one owner; "
                f"drop one of them{hint if axis == 'dp_replicate' else ''}"
            )
        is_integer = isinstance(size, int) and not isinstance(size, bool)
        if size != "auto" and not (is_integer and int(size) >= 1):
            raise ValueError(f"{owner} asks for {axis}={size!r}, but a size is a positive whole number or 'auto'")
        owners[axis], requested[axis] = owner, size
    return requested


def _product(sizes: Mapping[Axis, int]) -> str:
    used = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    return " x ".join(used) or "one rank"


def expert_sizes(sizes: Mapping[Axis, int]) -> list[int]:
    """Return the numbers of `ParallelMesh.loss` ranks over which experts may be sharded.

    They are the divisors of the ranks of one ZeRO replica, or whole replicas. E.g. 4 shards, 2 replicas: [1, 2, 4, 8].
    """
    shards, replicas = sizes["dp_shard"] * sizes["cp"], sizes["dp_replicate"]
    divisors = [size for size in range(1, shards + 1) if shards % size == 0]
    return divisors + [shards * count for count in range(2, replicas + 1) if replicas % count == 0]


def _grid(sizes: Mapping[Axis, int], device_type: str) -> DeviceMesh:
    """Return the mesh of all axes; axes of size 1 share one group, of this rank alone.

    `init_device_mesh` would create a group per rank for each such axis, one after the other, with all ranks waiting for
    each; a gloo group has three threads, one of which wakes up a hundred times a second. Where NCCL knows the ranks'
    devices (`device_id`), it splits off all groups of an axis together: there `init_device_mesh` creates them all.
    """
    shape, used = tuple(sizes.values()), {axis: size for axis, size in sizes.items() if size > 1}
    splits = dist.group.WORLD is None or dist.group.WORLD.bound_device_id is not None
    if splits or len(used) in (0, len(sizes)):
        return init_device_mesh(device_type, shape, mesh_dim_names=AXES)
    groups = init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))
    single_rank = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    of_axes = [groups.get_group(axis) if axis in used else single_rank for axis in AXES]
    ranks = torch.arange(prod(shape)).view(shape)
    return DeviceMesh.from_group(of_axes, device_type, mesh=ranks, mesh_dim_names=AXES)


class DefaultGroup(ContextDecorator):
    """Context in which a group is the default group of torch.distributed; reentrant, and also a decorator."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self._before = group, list[dist.ProcessGroup | None]()

    def __enter__(self) -> None:
        self._before.append(dist.group.WORLD)
        dist.GroupMember.WORLD = self.group

    def __exit__(self, *_: object) -> None:
        dist.GroupMember.WORLD = self._before.pop()


def rank_in_world() -> int:
    """Return this process's rank among all ranks, whatever the default group is; 0 without a process group."""
    default = dist.group.WORLD
    return 0 if default is None else dist.get_process_group_ranks(default)[default.rank()]


def index_in_mesh(mesh: DeviceMesh, dim: int = 0) -> int:
    """Return this rank's index along a dimension of a mesh.

    `DeviceMesh.get_local_rank` takes the rank in torch's default group for the rank in the world. This is wrong while
    `ParallelMesh.users` is the default group.
    """
    place = mesh.get_coordinate()
    assert place is not None  # this rank is in the mesh
    return place[dim]


class ParallelMesh:
    """The grid of ranks, with a process group for every axis and for the views that several techniques share.

    Args:
        sizes: the size of every axis, as `resolve_sizes` returns it.
        device_type: "cpu" or "cuda".

    The constructor is a collective: every rank creates the same groups in the same order.
    """

    def __init__(self, sizes: Mapping[Axis, int], device_type: str) -> None:
        self.sizes: dict[Axis, int] = {axis: sizes[axis] for axis in AXES}
        self.device_mesh: DeviceMesh = _grid(self.sizes, device_type)
        self._of_axes = {axis: self.device_mesh[axis] for axis in AXES}
        assert dist.group.WORLD is not None
        #: all ranks
        self.world: dist.ProcessGroup = dist.group.WORLD
        #: ranks that read different samples
        self.data = self._view("dp_replicate", "dp_shard")
        #: the number of all ranks
        self.world_size = prod(self.sizes.values())
        #: whether some ranks read the same samples, so that the data-parallel ranks are fewer than all ranks
        self.shares_samples = self.data.size() < self.world_size
        #: The data-parallel ranks as the default group of `torch.distributed`, for user code. A loss that gathers
        #: negatives, a learning rate scaled by the world size, or a counter of samples means by "the world" the ranks
        #: that read different samples. With dp=4 x tp=2 each of the 8 processes sees a world of 4, and its rank among
        #: these. Library code always names its group, and asks a group, not torch, for its rank in it.
        self.users = DefaultGroup(self.data.get_group())
        #: All ranks as the default group again, for library code that user code calls, such as the trainer's methods.
        self.everybody = DefaultGroup(self.world)
        #: ranks over which ZeRO shards states, gradients and parameters
        self.fsdp = self._view("dp_shard", "cp")
        #: ranks whose gradients are averaged: they read different samples, or different parts of a sequence
        self.loss = self._view("dp_replicate", "dp_shard", "cp")

    def __getitem__(self, axis: Axis) -> DeviceMesh:
        """The ranks that differ from this one in `axis` only."""
        return self._of_axes[axis]

    def __repr__(self) -> str:
        return f"ParallelMesh({_product(self.sizes)})"

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        kind = self.device_mesh.device_type
        return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device(kind)

    @property
    def is_first_of_stage(self) -> bool:
        """Whether this rank is the first of the ranks that hold the same layers."""
        coordinates = dict(zip(AXES, self.device_mesh.get_coordinate() or (), strict=True))
        return all(coordinate == 0 for axis, coordinate in coordinates.items() if axis != "pp")

    def as_user(self, call: Callable[..., T]) -> Callable[..., T]:
        """Return `call` so that it runs with the data-parallel ranks as the default group."""
        return self.users(call) if self.shares_samples else call

    def as_library(self, call: Callable[..., T]) -> Callable[..., T]:
        """Return `call` so that it runs with all ranks as the default group."""
        return self.everybody(call) if self.shares_samples else call

    @property
    def sharded_and_replicated(self) -> DeviceMesh:
        """The mesh (replicas, shards) of hybrid sharding; one-dimensional if there is one replica."""
        if self.sizes["dp_replicate"] == 1:
            return self.fsdp
        if self.sizes["cp"] == 1:
            return self.device_mesh["dp_replicate", "dp_shard"]
        return DeviceMesh._concatenate([self["dp_replicate"], self.fsdp])

    def experts(self, size: int) -> DeviceMesh:
        """Return the ranks of `loss` and `tp` as a mesh (ep_replicate, ep_shard, ep): which ranks hold which experts.

        Neighbours hold different experts. ZeRO shards along `ep_shard`; along `ep_replicate` are copies of the shards.
        Collective over all ranks: it creates the groups.

        Args:
            size: number of `loss` ranks that shard the experts, one of `expert_sizes`; each one's `tp` ranks join.
        """
        averaged = self.loss.size()
        replicas = averaged // max(size, self.fsdp.size())
        shape = (replicas, averaged // (replicas * size), size * self.sizes["tp"])
        tokens = self._view("dp_replicate", "dp_shard", "cp", "tp")  # the ranks that route different tokens
        view = tokens._unflatten(0, shape, ("ep_replicate", "ep_shard", "ep"))
        # pipeline stages that have no expert create the groups, too: creating a group is collective over all ranks
        if min(shape[:2]) > 1:
            view["ep_replicate", "ep_shard"]._flatten()
        return view

    def _view(self, *axes: Axis) -> DeviceMesh:
        used = [axis for axis in axes if self.sizes[axis] > 1] or [axes[0]]
        if len(used) == 1:
            return self.device_mesh[used[0]]
        return self.device_mesh[tuple(used)]._flatten("_".join(used))
