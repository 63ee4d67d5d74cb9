"""Between a whole tensor and the part of it that a rank keeps.

Where several axes of the mesh divide one tensor, the last of them divides first: a weight is split over `tp`, and what
a rank got of it over the ranks of ZeRO. Parts have ceil(size / ranks) rows, the last ones fewer, perhaps none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any, cast

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
from lightning_parallel.mesh import place_in


class ElementsShard(Shard):
    """The placement of a dimension of which each rank keeps elements of its own: `runs` are their spans, by rank.

    Fused weights are divided so, as each rank keeps a piece of each part, and heads that ranks do not share evenly.
    """

    def __init__(self, dim: int, runs: Sequence[Runs]) -> None:
        super().__init__(dim)
        self.runs = tuple(runs)
        # DTensor asserts that each `Shard` equals one of its dimension: torch 2.11 by `==`, 2.13 by `!=`.
        DTensorSpec._verify_shard_order = _require_shards_beside_elements  # type: ignore[assignment, method-assign]

    def __new__(cls, dim: int, runs: Sequence[Runs]) -> ElementsShard:  # noqa: D102
        return cast(Callable[..., ElementsShard], super().__new__)(cls, dim)

    # DTensor caches what operations do to placements, by the placements: there `Shard` is another one.

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


def placed(dim: int, size: int, runs: Sequence[Runs]) -> Placement:
    """The placement of these elements: torch's own where that says the same."""
    chunks = [joined([bounds(size, len(runs), rank)]) for rank in range(len(runs))]
    return Shard(dim) if list(runs) == chunks else ElementsShard(dim, runs)


def divides(placement: Placement) -> bool:
    """Whether ranks along the axis of this placement hold different parts."""
    return not placement.is_replicate() and not placement.is_partial()


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks hold different parts of the tensor. One rank's part has the shape of the whole."""
    return isinstance(tensor, DTensor) and any(map(divides, tensor.placements))


def local(tensor: Tensor) -> Tensor:
    """The plain tensor that this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def kept_of(parameter: Tensor) -> Tensor:
    """The plain tensor that this rank keeps of a parameter, without history; also in a step, where it looks whole."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()


Box = tuple[tuple[slice, ...], tuple[int, ...]]
"""Elements that lie together here and in the whole: their place in what this rank holds, their first index there."""


def boxes(tensor: Tensor) -> list[Box]:
    """The boxes of the whole that this rank holds: the one truth from which gathering and cutting follow.

    Rank 1 of 2 holds of a vector of 6, divided into rows, `[((slice(0, 3),), (3,))]`; of one fused from 4 and 2 of
    them, of each of which it has the second half, `[((slice(0, 2),), (2,)), ((slice(2, 3),), (5,))]`.
    """
    found: list[Box] = [((), ())]
    for runs in runs_of(tensor):
        ends = accumulate(stop - start for start, stop in runs)
        own = [(slice(end - (stop - start), end), start) for end, (start, stop) in zip(ends, runs, strict=True)]
        found = [((*slices, here), (*offset, first)) for slices, offset in found for here, first in own]
    return found


def runs_of(tensor: Tensor) -> list[list[Span]]:
    """The runs of indices of the whole that this rank holds of each dimension, in the order in which it holds them."""
    runs: list[list[Span]] = [[(0, size)] for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis, placement in reversed(list(enumerate(tensor.placements))):
            if divides(placement):
                dim: int = placement.dim  # type: ignore[attr-defined]
                size = sum(stop - start for start, stop in runs[dim])
                own = pieces(placement, size, mesh.size(axis), place_in(mesh, axis))
                runs[dim] = [run for piece in own for run in within(runs[dim], piece)]
    return runs


def pieces(placement: Placement, size: int, ranks: int, rank: int) -> list[Span]:
    """The pieces of a dimension of this size that a rank gets by one placement."""
    return list(placement.runs[rank]) if isinstance(placement, ElementsShard) else [bounds(size, ranks, rank)]


def shard_of(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's part of a tensor that every rank has whole, divided as `like` is; no communication.

    The part may share memory with the whole.
    """
    part = whole
    for dim, runs in enumerate(runs_of(like)):
        rows = [part.narrow(dim, start, stop - start) for start, stop in runs or [(0, 0)]]
        part = torch.cat(rows, dim) if len(rows) > 1 else rows[0]
    return as_shard(part.contiguous().to(like.device), like)


def shard_of_part(part: DTensor, like: DTensor) -> Tensor:
    """What this rank has of a part, which `like` divides along more axes than the part; no communication."""
    mesh, own, names = like.device_mesh, part.to_local(), like.device_mesh.mesh_dim_names or ()
    for axis, placement in reversed(list(enumerate(like.placements))):
        if divides(placement) and names[axis] not in (part.device_mesh.mesh_dim_names or ()):
            dim: int = placement.dim  # type: ignore[attr-defined]
            runs = pieces(placement, own.shape[dim], mesh.size(axis), place_in(mesh, axis))
            own = torch.cat([own.narrow(dim, start, stop - start) for start, stop in runs], dim)
    return own


def as_shard(part: Tensor, like: DTensor) -> DTensor:
    """A local tensor as this rank's part of a tensor of the shape of `like`."""
    return dtensor_of(part, like.device_mesh, like.placements, like.shape, like.stride())


def as_gradient(part: Tensor, parameter: Tensor) -> Tensor:
    """A gradient that a rank computed for its part, divided as the parameter is."""
    return as_shard(part, parameter) if isinstance(parameter, DTensor) else part


def divided_again(part: Tensor, mesh: DeviceMesh, whole: Tensor) -> DTensor:
    """Rows of what this rank holds of `whole`, which the ranks of `mesh` have divided among them."""
    shape, stride = whole.shape, whole.stride()
    if not isinstance(whole, DTensor):
        return dtensor_of(part, mesh, (Shard(0),), shape, stride)
    before, names = list(whole.placements), whole.device_mesh.mesh_dim_names or ()
    by_rows = [divides(placement) and placement.dim == 0 for placement in before]  # type: ignore[attr-defined]
    ranks = prod(whole.device_mesh.size(axis) for axis, rows in enumerate(by_rows) if rows)
    # For torch the first axis divides first. Rows of rows are strided there: that is how it says what we hold.
    again = _StridedShard(0, split_factor=ranks) if any(by_rows) else Shard(0)
    (name,) = mesh.mesh_dim_names or ("",)
    if name in names:  # an axis of its own along which the ranks had copies
        before[names.index(name)] = again
        return dtensor_of(part, whole.device_mesh, before, shape, stride)
    return dtensor_of(part, DeviceMesh._concatenate([mesh, whole.device_mesh]), (again, *before), shape, stride)


def parameter_part(parameter: nn.Parameter, mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    """A parameter of which this rank keeps its part alone, in place of one that it has whole, perhaps on meta."""
    whole = parameter.detach()
    device = whole.device if whole.is_meta else torch.device(mesh.device_type)
    like = dtensor_of(whole.new_empty(0, device=device), mesh, placements, whole.shape, whole.stride())
    part = shard_of(whole, like).to_local()
    part = part.clone() if not part.is_meta else part  # a view would keep the whole in memory
    made = nn.Parameter(as_shard(part, like), requires_grad=parameter.requires_grad)
    bear(made, parameter)
    return made


OF_TECHNIQUES = ("_leaf", "watch", "sharded", "computes")


def given_by_users(parameter: Tensor) -> dict[str, Any]:
    """The attributes that users gave a parameter, such as flags, without those that techniques gave it."""
    return {name: value for name, value in vars(parameter).items() if name not in OF_TECHNIQUES}


def bear(made: Tensor, parameter: Tensor) -> None:
    """Gives a tensor in place of a parameter the attributes that users gave the parameter."""
    vars(made).update(given_by_users(parameter))


def dtensor_of(
    part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """A local tensor as this rank's part of a whole of this shape.

    `DTensor.from_local` would move a shard that is kept on the host to the mesh's devices, and costs five times more.
    """
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, part.dtype))
    return cast(DTensor, made_as_dtensors_are(DTensor, part.detach(), spec, False))


made_as_dtensors_are = cast(Callable[[type[Tensor], Tensor, Any, bool], Any], Tensor._dtensor__new__)
"""Makes a DTensor of a class, a local tensor, a spec with `tensor_meta`, and whether the local one requires a gradient.

`DTensor(...)` would pass an `__init__` besides, which only compilers read and which takes longer than all else.
"""


def whole_tensor(value: Tensor) -> Tensor:
    """The tensor of which every rank of its mesh holds a part. Collective over the axes that divide it."""
    if not isinstance(value, DTensor):
        return value
    mesh, device = value.device_mesh, value.device_mesh.device_type
    part = value.to_local()
    if part.device.type != device:  # a mesh of GPUs has no collectives for shards kept on the host
        part = part.to(device)
    size_of, divided = list(value.shape), list[tuple[int, int, list[list[Span]], int]]()
    for axis, placement in reversed(list(enumerate(value.placements))):
        if divides(placement):
            dim: int = placement.dim  # type: ignore[attr-defined]
            held = [pieces(placement, size_of[dim], mesh.size(axis), rank) for rank in range(mesh.size(axis))]
            divided.append((axis, dim, held, size_of[dim]))
            size_of[dim] = length_of(held[place_in(mesh, axis)])
    for axis, dim, held, size in reversed(divided):
        part = _gather(part, mesh.get_group(axis), dim, held, size)
    return part


def _gather(part: Tensor, group: dist.ProcessGroup, dim: int, held: Sequence[Sequence[Span]], size: int) -> Tensor:
    chunk, rows = max(map(length_of, held)), part.movedim(dim, 0)  # rows: [own length of dim, ...]
    if rows.shape[0] < chunk:
        rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, chunk - rows.shape[0]))
    rows = rows.contiguous()
    gathered_rows = rows.new_empty(len(held) * chunk, *rows.shape[1:])  # each rank's rows, padded to the longest
    all_gather(gathered_rows, rows, group).wait()  # the ranks along one axis of the mesh meet here
    found: list[tuple[int, int, int]] = []  # (place among the gathered rows, start and stop in the whole)
    for rank, runs in enumerate(held):
        ends = accumulate((stop - start for start, stop in runs), initial=rank * chunk)
        found += [(place, start, stop) for place, (start, stop) in zip(ends, runs, strict=False)]
    if all(place == start for place, start, _ in found):
        whole = gathered_rows[:size]
    else:
        whole = rows.new_empty(size, *rows.shape[1:])
        for place, start, stop in found:
            whole[start:stop] = gathered_rows[place : place + stop - start]
    return whole.movedim(0, dim).contiguous()


def gathered(value: Tensor, keep: bool) -> Tensor:
    """A tensor whole and on the host where `keep`; elsewhere only its shape. Collective over the ranks of its mesh."""
    whole = whole_tensor(value)
    return whole.detach().cpu() if keep else torch.empty(whole.shape, dtype=whole.dtype, device="meta")


def has_no_rows(parameter: nn.Parameter) -> bool:
    """Whether a parameter cannot be divided by rows in place: a scalar, or memory that is not contiguous."""
    kept = kept_of(parameter)
    return kept.dim() == 0 or kept.numel() == 0 or not kept.is_contiguous()
