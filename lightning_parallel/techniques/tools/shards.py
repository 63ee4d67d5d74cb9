"""Conversion between a full tensor and the shard of it that a rank keeps.

If several mesh axes shard one tensor, the last axis shards first: a weight is split over `tp`, and the shard of each
`tp` rank over the ranks of ZeRO. Shards have ceil(size / ranks) rows; the last ones have fewer, perhaps none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from lightning_parallel.collectives.functional import all_gather
from lightning_parallel.collectives.spans import Runs, Span, bounds, joined, length_of, within
from lightning_parallel.mesh import index_in_mesh

TensorT = TypeVar("TensorT", bound=Tensor)


class ElementsShard(Shard):
    """Placement that gives each rank any set of indices of a dimension: `runs[rank]` lists them as spans.

    E.g. fused weights, of which each rank keeps a piece of each part, and attention heads that do not divide evenly.
    """

    def __init__(self, dim: int, runs: Sequence[Runs]) -> None:
        super().__init__(dim)
        self.runs = tuple(runs)
        # DTensor asserts that each `Shard` equals `Shard(dim)`: torch 2.11 by `==`, 2.13 by `!=`.
        DTensorSpec._verify_shard_order = _require_shards_beside_elements  # type: ignore[assignment, method-assign]

    def __new__(cls, dim: int, runs: Sequence[Runs]) -> ElementsShard:  # noqa: D102
        return cast(Callable[..., ElementsShard], super().__new__)(cls, dim)

    # DTensor caches the output placements of operations by the input placements: `Shard(dim)` must be a different key.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ElementsShard) and (self.dim, self.runs) == (other.dim, other.runs)

    def __hash__(self) -> int:
        return hash((ElementsShard, self.dim, self.runs))

    def __reduce__(self) -> tuple[type[ElementsShard], tuple[int, tuple[Runs, ...]]]:
        return ElementsShard, (self.dim, self.runs)


_require_shards = DTensorSpec._verify_shard_order


def _require_shards_beside_elements(spec: DTensorSpec, order: Any) -> None:
    if not any(isinstance(placement, ElementsShard) for placement in spec.placements):
        _require_shards(spec, order)


def placement_of(dim: int, size: int, runs: Sequence[Runs]) -> Placement:
    """Return the placement that gives each rank its `runs`: torch's `Shard` if that is the same."""
    chunks = [joined([bounds(size, len(runs), rank)]) for rank in range(len(runs))]
    return Shard(dim) if list(runs) == chunks else ElementsShard(dim, runs)


def shards_dim(placement: Placement) -> bool:
    """Return whether ranks along the axis of this placement hold different shards."""
    return not placement.is_replicate() and not placement.is_partial()


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is sharded; also True over an axis of size 1, where the shard has the full shape."""
    return isinstance(tensor, DTensor) and any(map(shards_dim, tensor.placements))


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, with its history; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_tensor_of(parameter: Tensor) -> Tensor:
    """Return the local tensor of a parameter without history; also in a step, where the parameter appears full."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()


Box = tuple[tuple[slice, ...], tuple[int, ...]]
"""Block of elements that are contiguous in both tensors: slices of the local tensor, first index in the full one."""


def boxes(tensor: Tensor) -> list[Box]:
    """Return the boxes of the full tensor that this rank holds.

    For a vector [6] sharded by rows, rank 1 of 2 has `[((slice(0, 3),), (3,))]`. If the vector is fused from parts of 4
    and 2, and ranks hold half of each part, rank 1 has `[((slice(0, 2),), (2,)), ((slice(2, 3),), (5,))]`.
    """
    result: list[Box] = [((), ())]
    for runs in runs_of(tensor):
        ends = accumulate(stop - start for start, stop in runs)
        spans = [(slice(end - (stop - start), end), start) for end, (start, stop) in zip(ends, runs, strict=True)]
        result = [((*slices, here), (*offset, start)) for slices, offset in result for here, start in spans]
    return result


def runs_of(tensor: Tensor) -> list[list[Span]]:
    """Return for each dimension the spans of indices of the full tensor that this rank holds, in local order."""
    runs: list[list[Span]] = [[(0, size)] for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis, placement in reversed(list(enumerate(tensor.placements))):
            if shards_dim(placement):
                dim: int = placement.dim  # type: ignore[attr-defined]
                size = sum(stop - start for start, stop in runs[dim])
                local_runs = pieces(placement, size, mesh.size(axis), index_in_mesh(mesh, axis))
                runs[dim] = [run for piece in local_runs for run in within(runs[dim], piece)]
    return runs


def pieces(placement: Placement, size: int, ranks: int, rank: int) -> list[Span]:
    """Return the spans of a dimension of this size that one placement gives to a rank."""
    return list(placement.runs[rank]) if isinstance(placement, ElementsShard) else [bounds(size, ranks, rank)]


def shard_of(whole: Tensor, like: DTensor) -> DTensor:
    """Return this rank's shard of a tensor, with the placements of `like`. No communication.

    Every rank has the tensor in full; or it is a DTensor, sharded along fewer mesh axes than `like`. The shard may
    share memory with it.
    """
    part, mesh = local(whole), like.device_mesh
    names, done = mesh.mesh_dim_names or range(mesh.ndim), set[str]()
    if isinstance(whole, DTensor):
        axes = zip(whole.device_mesh.mesh_dim_names or (), whole.placements, strict=True)
        done = {name for name, placement in axes if shards_dim(placement)}
    for axis, placement in reversed(list(enumerate(like.placements))):
        if shards_dim(placement) and names[axis] not in done:
            dim: int = placement.dim  # type: ignore[attr-defined]
            runs = pieces(placement, part.shape[dim], mesh.size(axis), index_in_mesh(mesh, axis))
            rows = [part.narrow(dim, start, stop - start) for start, stop in runs or [(0, 0)]]
            part = torch.cat(rows, dim) if len(rows) > 1 else rows[0]
    return as_shard(part.contiguous().to(like.device), like)


def as_shard(part: Tensor, like: TensorT) -> TensorT:
    """Return a local tensor as a DTensor with mesh, placements and shape of `like`; unchanged if that is no DTensor."""
    if not isinstance(like, DTensor):
        return cast(TensorT, part)
    return cast(TensorT, make_dtensor(part, like.device_mesh, like.placements, like))


def shard_rows_of(part: Tensor, mesh: DeviceMesh, whole: Tensor) -> DTensor:
    """Return a DTensor like `whole`, whose local tensor is sharded by rows over `mesh`; `part` are this rank's rows."""
    if not isinstance(whole, DTensor):
        return make_dtensor(part, mesh, (Shard(0),), whole)
    before, names = list(whole.placements), whole.device_mesh.mesh_dim_names or ()
    by_rows = [shards_dim(placement) and placement.dim == 0 for placement in before]  # type: ignore[attr-defined]
    ranks = prod(whole.device_mesh.size(axis) for axis, rows in enumerate(by_rows) if rows)
    # In torch the first mesh axis shards first, here the last one: torch expresses our rows of rows as strided shards.
    rows_of_rows = _StridedShard(0, split_factor=ranks) if any(by_rows) else Shard(0)
    (name,) = mesh.mesh_dim_names or ("",)
    if name in names:  # an axis of the tensor's mesh along which it was replicated
        before[names.index(name)] = rows_of_rows
        return make_dtensor(part, whole.device_mesh, before, whole)
    return make_dtensor(part, DeviceMesh._concatenate([mesh, whole.device_mesh]), (rows_of_rows, *before), whole)


def sharded_parameter(parameter: nn.Parameter, mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    """Return a sharded parameter in place of a full one, which may be on meta. No communication."""
    full = parameter.detach()
    device = full.device if full.is_meta else torch.device(mesh.device_type)
    like = make_dtensor(full.new_empty(0, device=device), mesh, placements, full)
    part = shard_of(full, like).to_local()
    part = part.clone() if not part.is_meta else part  # a view would keep the full tensor in memory
    sharded = nn.Parameter(as_shard(part, like), requires_grad=parameter.requires_grad)
    copy_user_attributes(sharded, parameter)
    return sharded


TECHNIQUE_ATTRIBUTES = ("_leaf", "watch", "sharded", "computes")
"""Attributes that techniques set on parameters."""


def user_attributes(parameter: Tensor) -> dict[str, Any]:
    """Return the attributes that users set on a parameter, such as flags."""
    return {name: value for name, value in vars(parameter).items() if name not in TECHNIQUE_ATTRIBUTES}


def copy_user_attributes(made: Tensor, parameter: Tensor) -> None:
    """Copy the attributes that users set on a parameter to the tensor that replaces it."""
    vars(made).update(user_attributes(parameter))


def make_dtensor(part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: Tensor) -> DTensor:
    """Return a DTensor of this local tensor, with shape and strides of `whole`.

    `DTensor.from_local` would move a shard that is kept on the host to the mesh's devices, and costs five times more.
    """
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(whole.shape, whole.stride(), part.dtype))
    return cast(DTensor, construct_dtensor(DTensor, part.detach(), spec, False))


construct_dtensor = cast(Callable[[type[Tensor], Tensor, Any, bool], Any], Tensor._dtensor__new__)
"""Constructor of DTensors: (class, local tensor, spec with `tensor_meta`, whether the local tensor requires grad).

`DTensor(...)` would also call an `__init__` that only compilers need, and that takes longer than everything else.
"""


def full_tensor_of(value: Tensor) -> Tensor:
    """Gather the full tensor of a DTensor. Collective over the mesh axes that shard it."""
    if not isinstance(value, DTensor):
        return value
    mesh, device = value.device_mesh, value.device_mesh.device_type
    part = value.to_local()
    if part.device.type != device:  # a GPU mesh has no collectives for host tensors
        part = part.to(device)
    size_of, axes = list(value.shape), list[tuple[int, int, list[list[Span]], int]]()
    for axis, placement in reversed(list(enumerate(value.placements))):
        if shards_dim(placement):
            dim: int = placement.dim  # type: ignore[attr-defined]
            held = [pieces(placement, size_of[dim], mesh.size(axis), rank) for rank in range(mesh.size(axis))]
            axes.append((axis, dim, held, size_of[dim]))
            size_of[dim] = length_of(held[index_in_mesh(mesh, axis)])
    for axis, dim, held, size in reversed(axes):
        part = _gather(part, mesh.get_group(axis), dim, held, size)
    return part


def _gather(part: Tensor, group: dist.ProcessGroup, dim: int, held: Sequence[Sequence[Span]], size: int) -> Tensor:
    """Gather `dim`, of full length `size`, over one mesh axis; `held` has the spans of each rank. Collective."""
    chunk, rows = max(map(length_of, held)), part.movedim(dim, 0)  # rows: [local length of dim, ...]
    if rows.shape[0] < chunk:
        rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, chunk - rows.shape[0]))
    rows = rows.contiguous()
    gathered_rows = rows.new_empty(len(held) * chunk, *rows.shape[1:])  # each rank's rows, padded to the longest
    all_gather(gathered_rows, rows, group).wait()  # the collective
    spans: list[tuple[int, int, int]] = []  # (place among the gathered rows, start, stop in the full tensor)
    for rank, runs in enumerate(held):
        ends = accumulate((stop - start for start, stop in runs), initial=rank * chunk)
        spans += [(place, start, stop) for place, (start, stop) in zip(ends, runs, strict=False)]
    if all(place == start for place, start, _ in spans):
        full = gathered_rows[:size]
    else:
        full = rows.new_empty(size, *rows.shape[1:])
        for place, start, stop in spans:
            full[start:stop] = gathered_rows[place : place + stop - start]
    return full.movedim(0, dim).contiguous()


def gathered(value: Tensor, keep: bool) -> Tensor:
    """Return the full tensor on the host if `keep`, else on meta. Collective over the ranks of the tensor's mesh."""
    full = full_tensor_of(value)
    return full.detach().cpu() if keep else torch.empty(full.shape, dtype=full.dtype, device="meta")


def cannot_shard_rows(parameter: nn.Parameter) -> bool:
    """Return whether a parameter cannot be sharded by rows in place: it is a scalar, empty or not contiguous."""
    tensor = local_tensor_of(parameter)
    return tensor.dim() == 0 or tensor.numel() == 0 or not tensor.is_contiguous()
