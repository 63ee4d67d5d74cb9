"""The ranks over which the gradient of a parameter is reduced and sharded; a check that its replicas are equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_parallel.collectives.functional import all_reduce_max
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.techniques.tools.shards import local

ROUNDING = 1e-4
"""Relative difference allowed between replicas of a parameter: hosts of different kinds round differently."""
SHOWN = 4
"""How many parameters an error names."""


@dataclass(frozen=True)
class Holders:
    """Ranks that hold a parameter, or the same shard of it, and compute its gradient from different samples."""

    all: DeviceMesh  # their gradients are summed
    sharing: DeviceMesh  # the ranks of `all` over which ZeRO shards the parameter
    replicas: DeviceMesh | None  # the ranks of `all` that keep the same shard under ZeRO; None if it is this rank alone
    scale: float  # factor of the sum: 1 / size of `mesh.loss`, also if fewer ranks hold the parameter, as of experts


def holders_of(parameter: Tensor, mesh: ParallelMesh) -> Holders:
    """Return the ranks that hold a parameter: those of `mesh.loss`, or fewer if these shard it, as they do experts.

    Experts are DTensors on a separate mesh, in which the axes that replicate come first: (replicas, shards, ...).
    """
    scale, replicated = 1.0 / mesh.loss.size(), copied_axes(parameter)
    if replicated is None:
        replicas = mesh["dp_replicate"] if mesh.sizes["dp_replicate"] > 1 else None
        return Holders(mesh.loss, mesh.fsdp, replicas, scale)
    if replicated.ndim == 1:
        return Holders(replicated, replicated, None, scale)
    first, *_, last = replicated.mesh_dim_names or ()
    return Holders(replicated._flatten(), replicated[last], replicated[first], scale)


def copied_axes(parameter: Tensor) -> DeviceMesh | None:
    """Return the axes of a DTensor parameter's mesh along which it is replicated; None if there are none."""
    if not isinstance(parameter, DTensor):
        return None
    names = parameter.device_mesh.mesh_dim_names or ()
    replicated = tuple(name for name, place in zip(names, parameter.placements, strict=False) if place.is_replicate())
    return parameter.device_mesh[replicated] if replicated else None


@torch.no_grad()
def require_equal_replicas(named: Mapping[str, nn.Parameter], mesh: ParallelMesh) -> None:
    """Raise ValueError if replicas of a parameter differ. Collective over all ranks, after the first training forward.

    Equal replicas stay equal if their gradients are averaged. But a step may set parameters itself, as a layer does
    that takes its scale from the first batch. Ranks that read different samples set different values then, and training
    never makes these equal again.
    """
    by_holders: dict[Holders, dict[str, nn.Parameter]] = {}
    for name, parameter in named.items() if mesh.loss.size() > 1 else ():
        by_holders.setdefault(holders_of(parameter, mesh), {})[name] = parameter
    for holders, parameters in by_holders.items():
        rows = []
        for parameter in parameters.values():
            values = local(parameter)
            numbers = (torch.view_as_real(values) if values.is_complex() else values).double()
            rows.append(torch.stack([numbers.sum(), numbers.abs().sum()]))  # replicas are compared by their sums
        sums = torch.stack(rows, dim=1)  # [2, parameters]
        maxima = torch.cat([sums, -sums[:1]]).nan_to_num()
        all_reduce_max(maxima, holders.all.get_group()).wait()  # [maximum, maximum of absolute values, -minimum]
        differ = (maxima[0] + maxima[2] > ROUNDING * maxima[1]).tolist()
        names = [name for name, differs in zip(parameters, differ, strict=True) if differs]
        if names:
            raise ValueError(
                f"{', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}: the {holders.all.size()} ranks with "
                "replicas hold different values after the first training_step, as each rank set them from its own "
                "samples; set them before the run, or from the samples of all ranks, by self.all_gather() or in a "
                "module named in ParallelPlan(whole_batch=...)"
            )
