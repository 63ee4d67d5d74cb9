"""Between a whole tensor and the part of it that a rank keeps.

Where several axes of the mesh divide one tensor, the last of them divides first: a weight is split over `tp`, and what
a rank got of it over the ranks of ZeRO. Parts have ceil(size / ranks) rows, the last ones fewer, perhaps none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from lightning_parallel.collectives.functional import all_gather


class PartsShard(Shard):
    """The placement of a fused weight: each of its parts is divided over the ranks, and a rank keeps its piece of each.

    Args:
        dim: the dimension along which the parts lie one after the other.
        parts: their sizes, each a multiple of the number of ranks.
    """

    def __init__(self, dim: int, parts: Sequence[int]) -> None:
        super().__init__(dim)
        self.parts = tuple(parts)

    def __new__(cls, dim: int, parts: Sequence[int]) -> PartsShard:  # noqa: D102
        make = cast(Callable[..., PartsShard], super().__new__)
        return make(cls, dim)

    # DTensor remembers what operations do to placements, under the placements: there `Shard` is another one. But it
    # asserts by `!=` that what is sharded differs in no way from `Shard`.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartsShard) and (self.dim, self.parts) == (other.dim, other.parts)

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, Shard) or self.dim != other.dim

    def __hash__(self) -> int:
        return hash((PartsShard, self.dim, self.parts))

    def __reduce__(self) -> tuple[type[PartsShard], tuple[int, tuple[int, ...]]]:
        return PartsShard, (self.dim, self.parts)

    def by_rank(self, whole: Tensor, ranks: int) -> Tensor:
        """The pieces of rank 0 of all parts, then those of rank 1, and so on."""
        pieces = [part.chunk(ranks, self.dim) for part in torch.split(whole, list(self.parts), self.dim)]
        return torch.cat([part[rank] for rank in range(ranks) for part in pieces], self.dim)

    def by_part(self, whole: Tensor, ranks: int) -> Tensor:
        """Takes `by_rank` back."""
        sizes = [part // ranks for part in self.parts]
        pieces = [torch.split(rank, sizes, self.dim) for rank in whole.chunk(ranks, self.dim)]
        return torch.cat([rank[part] for part in range(len(sizes)) for rank in pieces], self.dim)


def divides(placement: Placement) -> bool:
    """Whether ranks along the axis of this placement hold different parts."""
    return not placement.is_replicate() and not placement.is_partial()


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks hold different parts of the tensor."""
    return isinstance(tensor, DTensor) and any(map(divides, tensor.placements))


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_of(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's part of a tensor that every rank has whole, divided as `like` is; no communication.

    The part may share memory with the whole.
    """
    part, mesh = whole, like.device_mesh
    for axis, placement in reversed(list(enumerate(like.placements))):
        if divides(placement):
            part = _own_part(part, placement, mesh.size(axis), mesh.get_local_rank(axis))
    return as_shard(part.contiguous().to(like.device), like)


def _own_part(whole: Tensor, placement: Placement, ranks: int, rank: int) -> Tensor:
    if isinstance(placement, PartsShard):
        whole = placement.by_rank(whole, ranks)
    dim: int = placement.dim  # type: ignore[attr-defined]
    start, stop = bounds(whole.shape[dim], ranks, rank)
    return whole.narrow(dim, start, stop - start)


def bounds(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """From where to where a rank keeps a dimension of this size."""
    chunk = ceil(size / ranks)
    start = min(rank * chunk, size)
    return start, min(start + chunk, size)


def as_shard(part: Tensor, like: DTensor) -> DTensor:
    """A local tensor as this rank's part of a tensor of the shape of `like`."""
    return _part_of(part, like.device_mesh, like.placements, like)


def as_gradient(part: Tensor, parameter: Tensor) -> Tensor:
    """What a rank computed as the gradient of a parameter, as the parameter is divided."""
    return as_shard(part, parameter) if isinstance(parameter, DTensor) else part


def divided_again(part: Tensor, mesh: DeviceMesh, whole: Tensor) -> DTensor:
    """Rows of what this rank holds of `whole`, which the ranks of `mesh` have divided among them."""
    if not isinstance(whole, DTensor):
        return _part_of(part, mesh, (Shard(0),), whole)
    (before,) = whole.placements
    twice = divides(before) and before.dim == 0  # type: ignore[attr-defined]
    rows = _StridedShard(0, split_factor=whole.device_mesh.size()) if twice else Shard(0)
    both = DeviceMesh._concatenate([mesh, whole.device_mesh])
    return _part_of(part, both, (rows, before), whole)


def _part_of(part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: Tensor) -> DTensor:
    return dtensor_of(part, mesh, placements, whole.shape, whole.stride())


def dtensor_of(
    part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """A local tensor as this rank's part of a whole of this shape.

    `DTensor.from_local` would move a shard that is kept on the host to the mesh's devices, and costs five times more.
    """
    wrap = cast(Callable[..., DTensor], DTensor)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, part.dtype))
    return wrap(part.detach(), spec, requires_grad=False)


def whole_tensor(value: Tensor) -> Tensor:
    """The tensor of which every rank of its mesh holds a part; all of them must call."""
    if not isinstance(value, DTensor):
        return value
    mesh, device = value.device_mesh, value.device_mesh.device_type
    part = value.to_local()
    if part.device.type != device:  # a mesh of GPUs has no collectives for shards kept on the host
        part = part.to(device)
    for axis, (placement, shape) in enumerate(zip(value.placements, _shapes(value), strict=True)):
        if divides(placement):
            part = _gather(part, mesh, axis, placement, shape)
    return part


def _shapes(value: DTensor) -> list[list[int]]:
    """For each axis of the mesh the shape of what it divides."""
    mesh, shape = value.device_mesh, list(value.shape)
    shapes: list[list[int]] = []
    for axis, placement in reversed(list(enumerate(value.placements))):
        shapes.insert(0, list(shape))
        if divides(placement):
            dim: int = placement.dim  # type: ignore[attr-defined]
            start, stop = bounds(shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
            shape[dim] = stop - start
    return shapes


def _gather(part: Tensor, mesh: DeviceMesh, axis: int, placement: Placement, shape: list[int]) -> Tensor:
    dim: int = placement.dim  # type: ignore[attr-defined]
    ranks, rows = mesh.size(axis), part.movedim(dim, 0)
    chunk = ceil(shape[dim] / ranks)
    rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, chunk - rows.shape[0])).contiguous()
    gathered_rows = rows.new_empty(ranks * chunk, *rows.shape[1:])
    all_gather(gathered_rows, rows, mesh.get_group(axis)).wait()
    whole = gathered_rows[: shape[dim]].movedim(0, dim).contiguous()
    return placement.by_part(whole, ranks) if isinstance(placement, PartsShard) else whole


def gathered(value: Tensor, keep: bool) -> Tensor:
    """A tensor whole and on the host where `keep`; elsewhere only its shape. All ranks of its mesh must call."""
    whole = whole_tensor(value)
    return whole.detach().cpu() if keep else torch.empty_like(whole, device="meta")


def has_no_rows(parameter: nn.Parameter) -> bool:
    """Whether a parameter cannot be divided by rows in place: a scalar, or memory that is not contiguous."""
    kept = local(parameter.detach())
    return kept.dim() == 0 or kept.numel() == 0 or not kept.is_contiguous()


# ---------------------------------------------------------------- computing with what a rank keeps


def leaf_of(parameter: Tensor) -> Tensor:
    """What computation differentiates for a parameter: itself, or the plain tensor that a rank keeps of it.

    Operations on a DTensor cost several times as much as those on a plain tensor, its conversion within autograd
    hardly less. So the plain part is a leaf of its own, whose gradient moves to the parameter as it arrives; hooks
    on the parameter then run as if it had got there by itself.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():
        # Gradients of a graph are DTensors, and torch cannot add up those in parts.
        in_parts = any(isinstance(placement, PartsShard) for placement in parameter.placements)
        return _outside_of_graphs(parameter) if in_parts else parameter.to_local()
    return _plain_leaf(parameter)


def _plain_leaf(parameter: DTensor) -> Tensor:
    kept = parameter._local_tensor
    leaf: _Leaf | None = vars(parameter).get("_leaf")
    if leaf is None or leaf.kept is not kept or leaf.parameter is not parameter:
        leaf = vars(parameter)["_leaf"] = _Leaf(parameter)
    if leaf.tensor.requires_grad is not parameter.requires_grad:
        leaf.tensor.requires_grad_(parameter.requires_grad)
        leaf.listen()
    return leaf.tensor


_outside_of_graphs: Callable[[DTensor], Tensor] = cast(Any, torch.compiler.disable)(_plain_leaf)


def forget_leaves() -> None:
    """Lets go of all plain parts: the garbage collector does not see what their hooks hold."""
    while _leaves:
        leaf = _leaves.pop()
        vars(leaf.parameter).pop("_leaf", None)
        leaf.parameter = None


class _Leaf:
    def __init__(self, parameter: DTensor) -> None:
        self.parameter: Any = parameter
        self.kept = parameter._local_tensor
        self.tensor = self.kept.detach()
        self._listens = False

    def listen(self) -> None:
        if not self._listens and self.tensor.requires_grad:
            register = cast(Callable[..., object], self.tensor.register_post_accumulate_grad_hook)
            register(self._move_gradient)
            self._listens = True
            _leaves.append(self)

    def _move_gradient(self, tensor: Tensor) -> None:
        gradient: Any = tensor.grad
        tensor.grad, parameter = None, self.parameter
        if gradient is None:  # handed over by a pipeline for a parameter that no step used
            pass
        elif parameter.grad is None:
            wrap = cast(Callable[..., Tensor], DTensor)
            parameter.grad = wrap(gradient, parameter._spec, requires_grad=False)
        else:
            local(parameter.grad).add_(gradient.detach())
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            hook(parameter)


_leaves: list[_Leaf] = []
