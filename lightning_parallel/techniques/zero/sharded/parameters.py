"""Sharding of parameters (ZeRO stage 3): which ones are gathered together, and over which ranks each is sharded.

Source: S. Rajbhandari et al., ZeRO, SC 2020; Y. Zhao et al., PyTorch FSDP, VLDB 2023.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from lightning_parallel.collectives.functional import is_gloo
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.techniques.tools.holders import copied_axes
from lightning_parallel.techniques.tools.redirect import redirect_forward
from lightning_parallel.techniques.tools.replaced_parameters import places
from lightning_parallel.techniques.tools.shards import cannot_shard_rows, copy_user_attributes, make_dtensor, shards_dim
from lightning_parallel.techniques.zero.sharded.fsdp import ParamGroup, remove_hooks_of_state_dicts
from lightning_parallel.techniques.zero.sharded.root import Root, Unit, entrances

UNIT_BYTES = 16 * 2**20
"""Blocks are gathered together in units of at least this size: the hooks for smaller ones cost more than they save."""


def shard_parameters(model: nn.Module, mesh: ParallelMesh, plan: ParallelPlan, offload: bool) -> Root:
    """Shard every parameter that can be sharded, and return the root through which steps must run.

    Raises:
        TypeError: the model has an embedding with sparse gradients.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TypeError(f"sparse gradients ({name}, made with sparse=True) cannot be sharded; use sparse=False")
    unsharded_params = _unshardable(model)  # before sharding, after which some ranks have no rows of some parameters
    kinds = _kinds_of_parameters(model, mesh, set(unsharded_params))
    # A pipeline runs its blocks many times in a step: there the root gathers them, once.
    blocks = list(plan.find_blocks(model).values()) if mesh.sizes["pp"] == 1 else []
    groups, before = _groups_of_blocks(blocks), places(model)
    root, common = Root(model, unsharded_params), _common(groups, model)
    for kind in kinds:
        of_units = kind.parameters - common
        for group in groups:
            units = [_wrap(block) for block in group if any(p in of_units for p in block.parameters())]
            root.units.extend(units)
            if units:
                kind.shard(units, root, offload, common)
    for module in entrances(model):
        redirect_forward(module, root.enter)
    ordinary, *others = kinds
    for kind in others:
        if not kind.parameters.isdisjoint(model.parameters()):  # else the units have sharded all of this kind
            root.shells.append(shell := Unit(model, _run))
            kind.shard([shell], root, offload, stays_full=True)
    ordinary.shard([root], root, offload, stays_full=True)
    for place, parameter in places(model).items():
        copy_user_attributes(parameter, before[place])
    root.attach()
    remove_hooks_of_state_dicts(root)
    return root


@dataclass(frozen=True, eq=False)
class ShardingGroup:
    """Parameters that are sharded over the same ranks.

    Attributes:
        mesh: the ranks, with axes (shards) or (replicas, shards).
        scale: factor of gradients before they are summed; None for one over the number of ranks.
        parameters: the parameters, before they are sharded.
    """

    mesh: DeviceMesh
    scale: float | None
    parameters: set[nn.Parameter]

    def shard(
        self,
        modules: list[Any],
        root: Root,
        offload: bool,
        besides: Collection[nn.Parameter] = (),
        stays_full: bool = False,
    ) -> None:
        """Pass modules to `fully_shard` as one group, which shards those of their parameters that are of this kind.

        Args:
            modules: the modules.
            root: the root of the model.
            offload: whether shards are kept in host memory.
            besides: parameters to leave to the root.
            stays_full: whether the parameters are full throughout a step, and from the beginning of its backward.
        """
        policy = CPUOffloadPolicy(pin_memory=self.mesh.device_type != "cpu") if offload else OffloadPolicy()
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=self.mesh,
            reshard_after_forward=root not in modules,
            offload_policy=policy,
            ignored_params={p for p in root.model.parameters() if p not in self.parameters or p in besides},
        )
        for module in modules:
            if self.scale is not None:
                module.set_gradient_divide_factor(1.0)
            if self.scale is not None or is_gloo(self.mesh.get_group(self.mesh.ndim - 1)):
                module.set_force_sum_reduction_for_comms(True)  # only NCCL has a reduction that sums and divides
        root.groups.append(ParamGroup(modules, stays_full, self.mesh, self.scale, root))


def _kinds_of_parameters(
    model: nn.Module, mesh: ParallelMesh, unsharded_params: Collection[nn.Parameter]
) -> list[ShardingGroup]:
    """Return the parameters sharded over all ranks, then those over fewer (e.g. experts, replaced in the model)."""
    ordinary = ShardingGroup(mesh.sharded_and_replicated, None, set())
    fewer: dict[DeviceMesh, ShardingGroup] = {}
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in unsharded_params:
                continue
            ranks = copied_axes(parameter)
            if ranks is None:
                ordinary.parameters.add(parameter)
                continue
            if parameter not in shards:
                # the same local shard without the mesh axes that replicate it: `fully_shard` adds these
                stored: Any = parameter
                axes = zip(stored.device_mesh.mesh_dim_names or (), stored.placements, strict=True)
                placements = {name: place for name, place in axes if shards_dim(place)}
                submesh = stored.device_mesh[tuple(placements)]
                shard = make_dtensor(stored._local_tensor, submesh, [*placements.values()], stored)
                shards[parameter] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
                copy_user_attributes(shards[parameter], parameter)
                shards[shards[parameter]] = shards[parameter]
                fewer.setdefault(ranks, ShardingGroup(ranks, 1 / mesh.loss.size(), set())).parameters.add(
                    shards[parameter]
                )
            module._parameters[name] = shards[parameter]
    return [ordinary, *fewer.values()]


def _unshardable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that `fully_shard` refuses: without rows, or not of the model's most frequent dtype."""
    parameters = list(model.parameters())
    sizes: dict[torch.dtype, int] = {}
    for parameter in parameters:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    main = max(sizes, key=sizes.__getitem__, default=None)
    return [parameter for parameter in parameters if cannot_shard_rows(parameter) or parameter.dtype != main]


def _wrap(block: nn.Module) -> Unit:
    unit = Unit(block, block.forward)
    redirect_forward(block, lambda _: unit)
    return unit


def _run(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


def _common(groups: Sequence[Sequence[nn.Module]], model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters shared by several groups of blocks, or by a block and a module outside: the root's."""
    inside = {module for group in groups for block in group for module in block.modules()}
    owners = defaultdict[nn.Parameter, set[int]](set)
    for number, group in enumerate(groups):
        for parameter in (p for block in group for p in block.parameters()):
            owners[parameter].add(number)
    for module in (module for module in model.modules() if module not in inside):
        for parameter in module.parameters(recurse=False):
            owners[parameter].add(-1)
    return {parameter for parameter, numbers in owners.items() if len(numbers) > 1}


def _groups_of_blocks(blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Split the blocks into consecutive groups of about equal bytes; no groups if there would be fewer than two."""
    sizes = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks]
    count = min(len(blocks), sum(sizes) // UNIT_BYTES)
    if count < 2:
        return []
    groups: list[list[nn.Module]] = [[] for _ in range(count)]
    offset = 0
    for block, size in zip(blocks, sizes, strict=True):
        groups[min(count - 1, offset * count // sum(sizes))].append(block)
        offset += size
    return [group for group in groups if group]
