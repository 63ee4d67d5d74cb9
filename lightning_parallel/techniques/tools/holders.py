"""Over which ranks the gradient of a parameter is summed and divided, and whether copies of it stay alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_parallel.collectives.functional import highest
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.techniques.tools.shards import local

ROUNDING = 1e-4
"""How much copies of a parameter may differ, of its size: hosts of other kinds round otherwise."""
SHOWN = 4


@dataclass(frozen=True)
class Holders:
    """Ranks that hold a parameter, or the same part of it, and compute its gradients from other samples."""

    all: DeviceMesh  # whose gradients are summed
    sharing: DeviceMesh  # those of them among which ZeRO divides it
    replicas: DeviceMesh | None  # those of them that keep the same shard of it; None where this rank alone does
    scale: float  # by what the sum is multiplied: 1 / the number of all ranks, however few of them hold a parameter


def holders_of(parameter: Tensor, mesh: ParallelMesh) -> Holders:
    """The ranks that hold a parameter: those of `mesh.loss`, or fewer if it is divided among them, as experts are.

    Experts are DTensors on a mesh of their own, in which axes that copy come first: (replicas, shards, ...).
    """
    scale, copied = 1.0 / mesh.loss.size(), copied_axes(parameter)
    if copied is None:
        replicas = mesh["dp_replicate"] if mesh.sizes["dp_replicate"] > 1 else None
        return Holders(mesh.loss, mesh.fsdp, replicas, scale)
    if copied.ndim == 1:
        return Holders(copied, copied, None, scale)
    first, *_, last = copied.mesh_dim_names or ()
    return Holders(copied._flatten(), copied[last], copied[first], scale)


def copied_axes(parameter: Tensor) -> DeviceMesh | None:
    """The axes of a parameter's own mesh along which it is copied; None where no axis copies it."""
    if not isinstance(parameter, DTensor):
        return None
    names = parameter.device_mesh.mesh_dim_names or ()
    copied = tuple(name for name, place in zip(names, parameter.placements, strict=False) if place.is_replicate())
    return parameter.device_mesh[copied] if copied else None


class Replicas:
    """Compares the copies of a model's parameters, once.

    Averaged gradients keep alike what was alike before. A step may set parameters itself, as a layer does that takes
    its scale from the first batch; where ranks read different samples their copies part, and no gradient brings them
    together.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh) -> None:
        self._copies: dict[Holders, dict[str, nn.Parameter]] = {}
        for name, parameter in model.named_parameters() if mesh.loss.size() > 1 else ():
            self._copies.setdefault(holders_of(parameter, mesh), {})[name] = parameter

    @torch.no_grad()
    def require_alike(self) -> None:
        """Raises ValueError if copies differ. Collective over all ranks, after the first forward of training."""
        for holders, parameters in self._copies.items():
            rows = []
            for parameter in parameters.values():
                kept = local(parameter)
                numbers = (torch.view_as_real(kept) if kept.is_complex() else kept).double()
                rows.append(torch.stack([numbers.sum(), numbers.abs().sum()]))
            sums = torch.stack(rows, dim=1)  # [2, parameters]
            most = torch.cat([sums, -sums[:1]]).nan_to_num()
            highest(most, holders.all.get_group()).wait()
            differ = (most[0] + most[2] > ROUNDING * most[1]).tolist()
            names = [name for name, differs in zip(parameters, differ, strict=True) if differs]
            if names:
                raise ValueError(
                    f"{', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}: the {holders.all.size()} ranks "
                    "that hold copies hold different values after the first training_step, as each rank set them from "
                    "its own samples; set them from those of all ranks, in a module that the plan names "
                    "(ParallelPlan(whole_batch=...)) or by self.all_gather(), or before the run"
                )
