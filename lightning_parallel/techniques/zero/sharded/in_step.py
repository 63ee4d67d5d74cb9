"""Shards of parameters while a step runs: whatever uses one, uses the whole parameter.

Between the forwards of its blocks a unit is sharded, so code of the step's own that reads a weight of a block outside
of that block (a penalty on weights, a copy of a block, a tied weight) finds a shard. While a step runs shards have the
class `ShardInStep`, which every use of them in Python passes through. The first function that needs values of one
gathers its unit; from then on the unit is whole from the beginning of every step to its end, as is what belongs to no
unit. All ranks must read in the same step, as they must run the same blocks.

| a unit | in a forward | in a backward |
|---|---|---|
| as a rule | whole while its blocks run | whole while its blocks go back; then its gradients are reduced |
| read outside of its blocks | whole | whole; its gradients are reduced at the end |
| differentiated twice (`create_graph`) | whole | whole: the graph of its backward reads it, too |
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lightning_parallel.techniques.divided.parts import computing
from lightning_parallel.techniques.divided.table import is_in_place
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.tools.global_shard import ABOUT, global_of
from lightning_parallel.techniques.tools.leaves import leaf_of
from lightning_parallel.techniques.tools.shards import shard_of
from lightning_parallel.techniques.zero.sharded.fsdp import ShardedParameter

METADATA = ABOUT - {"detach", "grad", "backward", "to_local", "redistribute"}  # "grad" is of `torch.autograd`
METADATA |= {"__get__", "__set__", "__delete__", "__repr__", "data_ptr", "untyped_storage"}
"""Functions that ask about a tensor, and need not its values."""

VALUES = frozenset((Tensor.data, Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.real, Tensor.imag))
"""Attributes by which its values are read or written."""

LEARN = (Tensor.requires_grad.__set__, Tensor.requires_grad_)  # type: ignore[attr-defined]


class ShardInStep(DTensor):
    """The class of a sharded parameter while a step runs.

    Attributes:
        sharded: the parameter.
    """

    sharded: ShardedParameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, attribute = kwargs or {}, getattr(func, "__self__", None)
        if attribute is Tensor.grad:
            return args[0]._gradient(func, *args[1:])
        if func.__name__ in METADATA and attribute not in VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            if func in LEARN:  # as `toggle_optimizer` does, which has shards
                whole = args[0].sharded.whole
                if whole is not None:
                    leaf_of(whole.requires_grad_(args[0].requires_grad))  # what autograd has for it learns alike
            return result
        first: Any = args[0].standing() if args and type(args[0]) is cls else None
        divided = isinstance(first, DTensor)  # as experts are
        if divided and attribute is Tensor.data:
            with torch._C.DisableTorchFunctionSubclass():
                return func(first, *args[1:])
        args, kwargs = tree_map_only(cls, cls.full, (tuple(args), kwargs))
        result = func(*args, **kwargs)
        if divided and is_in_place(func.__name__):
            first._local_tensor.copy_(shard_of(args[0].detach(), first)._local_tensor)
        return result

    def standing(self) -> Any:
        """What code sees for the parameter where its unit is whole: the whole, or what computes as the whole."""
        self.sharded.group.keep()
        return computing(self.sharded.whole)

    def full(self) -> Any:
        """The whole parameter."""
        standing = self.standing()
        return standing.full_tensor() if isinstance(standing, DTensor) else standing

    def _gradient(self, func: Any, *given: Any) -> Any:
        """Read or write `grad`; a whole gradient that a step gives belongs to the whole parameter."""
        if given and isinstance(given[0], Tensor) and not isinstance(given[0], DTensor):
            standing = self.standing()
            standing.grad = shard_of(given[0], standing) if isinstance(standing, DTensor) else given[0]
            return None
        with torch._C.DisableTorchFunctionSubclass():
            found = func(self, *given)
        return found if found is None else global_of(found)

    def __deepcopy__(self, memo: Any) -> Any:
        full = self.full()
        if isinstance(full, Divided):
            return memo.setdefault(id(self), copy.deepcopy(full, memo))
        return memo.setdefault(id(self), nn.Parameter(full.detach().clone(), full.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)
