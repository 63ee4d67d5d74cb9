"""Over which ranks the gradient of a parameter is summed and divided, and which of them hold the same of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class Holders:
    """Ranks that hold a parameter, or the same part of it, and compute its gradients from other samples.

    Attributes:
        all: whose gradients are summed.
        sharing: those of them among which ZeRO divides it.
        replicas: those of them that keep the same shard of it; None where this rank alone does.
        scale: by what the sum is multiplied: 1 / the number of all ranks, however few of them hold a parameter.
    """

    all: DeviceMesh
    sharing: DeviceMesh
    replicas: DeviceMesh | None
    scale: float


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
