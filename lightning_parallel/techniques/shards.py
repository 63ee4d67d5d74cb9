"""Between a whole tensor and the part of it that a rank keeps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks hold different parts of the tensor."""
    return isinstance(tensor, DTensor) and any(isinstance(placement, Shard) for placement in tensor.placements)


def shard_of(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's part of a tensor that every rank has whole, divided as `like` is; no communication.

    The part may share memory with the whole.
    """
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def as_shard(local: Tensor, like: DTensor) -> DTensor:
    """A local tensor as this rank's part of a tensor of the shape of `like`."""
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def whole_tensor(value: Tensor) -> Tensor:
    """The tensor of which every rank of its mesh holds a part; all of them must call."""
    if not isinstance(value, DTensor):
        return value
    mesh_device = value.device_mesh.device_type
    if value.device.type != mesh_device:  # a mesh of GPUs has no collectives for shards kept on the host
        value = as_shard(value.to_local().to(mesh_device), value)
    return value.full_tensor()


def gathered(value: Tensor, keep: bool) -> Tensor:
    """A tensor whole and on the host where `keep`; elsewhere only its shape. All ranks of its mesh must call."""
    whole = whole_tensor(value)
    return whole.detach().cpu() if keep else torch.empty_like(whole, device="meta")


def has_no_rows(parameter: nn.Parameter) -> bool:
    """Whether a parameter cannot be divided by rows in place: a scalar, or memory that is not contiguous."""
    return parameter.dim() == 0 or parameter.numel() == 0 or not parameter.is_contiguous()
