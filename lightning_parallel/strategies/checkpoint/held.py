"""What users' hooks see in a sharded checkpoint of tensors that DTensor cannot compute with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.techniques.tools.shards import ElementsShard


class HeldTensor(Tensor):
    """A tensor of which each rank has a list of elements: it has a shape and a dtype, and every operation is refused.

    DTensor would take the result of one for plain rows, and the checkpoint would have them in another order.

    Args:
        held: the tensor itself.
    """

    held: DTensor

    def __new__(cls, held: DTensor) -> HeldTensor:  # noqa: D102
        make: Any = Tensor._make_wrapper_subclass
        made: HeldTensor = make(cls, held.shape, dtype=held.dtype, device=held.device)
        made.held = held
        return made

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held)
        raise RuntimeError(  # of a TypeError Python would make another one
            f"{func} of a tensor of shape {tuple(args[0].shape)} that ranks hold in pieces: a sharded checkpoint has "
            "what each rank holds; change the parameter itself, or pass checkpoint='full' to the strategy"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HeldTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def shown_to_hooks(tensor: Tensor) -> Tensor:
    """A tensor as it stands in a checkpoint that is made of what each rank has."""
    in_pieces = isinstance(tensor, DTensor) and any(isinstance(it, ElementsShard) for it in tensor.placements)
    return HeldTensor(tensor) if in_pieces and isinstance(tensor, DTensor) else tensor


def itself(tensor: Tensor) -> Tensor:
    """Takes `shown_to_hooks` back."""
    return tensor.held if isinstance(tensor, HeldTensor) else tensor
