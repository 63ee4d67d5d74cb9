"""Sharding parameters: which of them together, and over which ranks.

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
from lightning_parallel.techniques.tools.shards import bear, divides, dtensor_of, has_no_rows
from lightning_parallel.techniques.zero.sharded.fsdp import ParamGroup, remove_hooks_of_state_dicts
from lightning_parallel.techniques.zero.sharded.root import Root, Unit, entrances

UNIT_BYTES = 16 * 2**20
"""Blocks are gathered together until a unit has this size: smaller messages cost more in hooks than they save."""


def shard_parameters(model: nn.Module, mesh: ParallelMesh, plan: ParallelPlan, offload: bool) -> Root:
    """Shards every parameter that can be, and returns the root through which steps must run.

    Raises:
        TypeError: an embedding that makes sparse gradients.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TypeError(f"sparse gradients ({name}, made with sparse=True) cannot be sharded; use sparse=False")
    left_whole = _unshardable(model)  # afterwards some ranks have no rows of what others have
    kinds = _kinds_of_parameters(model, mesh, set(left_whole))
    # A pipeline runs its blocks many times in a step: there they are gathered once, with the root.
    blocks = list(plan.find_blocks(model).values()) if mesh.sizes["pp"] == 1 else []
    groups, before = _groups_of_blocks(blocks), _places(model)
    root, common = Root(model, left_whole), _common(groups, model)
    for kind in kinds:
        own = kind.parameters - common
        for group in groups:
            units = [_wrap(block) for block in group if any(p in own for p in block.parameters())]
            root.units.extend(units)
            if units:
                kind.shard(units, root, offload, common)
    for module in entrances(model):
        redirect_forward(module, root.enter)
    ordinary, *others = kinds
    for kind in others:
        if not kind.parameters.isdisjoint(model.parameters()):  # else units have all of this kind
            root.shells.append(shell := Unit(model, _run))
            kind.shard([shell], root, offload, stays_whole=True)
    ordinary.shard([root], root, offload, stays_whole=True)
    for place, parameter in _places(model).items():
        bear(parameter, before[place])
    root.attach()
    remove_hooks_of_state_dicts(root)
    return root


@dataclass(frozen=True, eq=False)
class Kind:
    """Parameters that the same ranks share.

    Attributes:
        mesh: these ranks, (shards) or (replicas, shards).
        scale: by what gradients are multiplied before they are summed, where that is not one over their number.
        parameters: those of them that are not sharded yet.
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
        stays_whole: bool = False,
    ) -> None:
        """Gives modules to `fully_shard`, all together, with those of their parameters that are of this kind.

        Args:
            modules: these.
            root: of all.
            offload: whether shards lie on the host.
            besides: parameters that are left to others.
            stays_whole: whether these parameters are whole during the whole step, and in backward at once.
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
                module.set_force_sum_reduction_for_comms(True)  # what divides within a sum, NCCL alone has
        root.groups.append(ParamGroup(modules, stays_whole, self.mesh, self.scale, root))


def _places(model: nn.Module) -> dict[tuple[nn.Module, str], nn.Parameter]:
    tables = [(module, module._parameters) for module in model.modules()]
    return {(module, name): each for module, table in tables for name, each in table.items() if each is not None}


def _kinds_of_parameters(model: nn.Module, mesh: ParallelMesh, left_whole: Collection[nn.Parameter]) -> list[Kind]:
    """First those that all ranks share, then those that fewer do, as experts."""
    ordinary = Kind(mesh.sharded_and_replicated, None, set())
    fewer: dict[DeviceMesh, Kind] = {}
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in left_whole:
                continue
            ranks = copied_axes(parameter)
            if ranks is None:
                ordinary.parameters.add(parameter)
                continue
            if parameter not in made:
                # the same part on the axes that divide it alone: `fully_shard` adds those along which it is copied
                stored: Any = parameter
                names = zip(stored.device_mesh.mesh_dim_names or (), stored.placements, strict=True)
                kept = {name: place for name, place in names if divides(place)}
                own = stored.device_mesh[tuple(kept)]
                part = dtensor_of(stored._local_tensor, own, [*kept.values()], stored.shape, stored.stride())
                made[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
                bear(made[parameter], parameter)
                made[made[parameter]] = made[parameter]
                fewer.setdefault(ranks, Kind(ranks, 1 / mesh.loss.size(), set())).parameters.add(made[parameter])
            module._parameters[name] = made[parameter]
    return [ordinary, *fewer.values()]


def _unshardable(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that `fully_shard` refuses: those without rows, and those that are not of the model's main dtype."""
    parameters = list(model.parameters())
    bytes_of: dict[torch.dtype, int] = {}
    for parameter in parameters:
        bytes_of[parameter.dtype] = bytes_of.get(parameter.dtype, 0) + parameter.numel()
    main = max(bytes_of, key=bytes_of.__getitem__, default=None)
    return [parameter for parameter in parameters if has_no_rows(parameter) or parameter.dtype != main]


def _wrap(block: nn.Module) -> Unit:
    unit = Unit(block, block.forward)
    redirect_forward(block, lambda _: unit)
    return unit


def _run(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


def _common(groups: Sequence[Sequence[nn.Module]], model: nn.Module) -> set[nn.Parameter]:
    """Parameters that blocks of several groups have, or that stand outside of all, too: they are the root's."""
    inside = {part for group in groups for block in group for part in block.modules()}
    found = defaultdict[nn.Parameter, set[int]](set)
    for number, group in enumerate(groups):
        for parameter in (p for block in group for p in block.parameters()):
            found[parameter].add(number)
    for module in (module for module in model.modules() if module not in inside):
        for parameter in module.parameters(recurse=False):
            found[parameter].add(-1)
    return {parameter for parameter, places in found.items() if len(places) > 1}


def _groups_of_blocks(blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    sizes = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks]
    count = min(len(blocks), sum(sizes) // UNIT_BYTES)
    if count < 2:
        return []
    groups: list[list[nn.Module]] = [[] for _ in range(count)]
    before = 0
    for block, size in zip(blocks, sizes, strict=True):
        groups[min(count - 1, before * count // sum(sizes))].append(block)
        before += size
    return [group for group in groups if group]
