"""Shards of parameters and gradients that compute as the full tensor, for user code that runs between steps.

Where ranks hold shards, user code between steps (hooks, callbacks, loggers, averages of weights) sees tensors of the
class `GlobalShard`. All ranks must run the same operations on them, as with any collective. There are four kinds:

| operation                              | computed on                     | returns                    | messages   |
|----------------------------------------|---------------------------------|----------------------------|------------|
| elementwise, by torch's tag            | local shards of equal placement | a `GlobalShard`            | none       |
| a reduction of all elements            | local shards, then over ranks   | the full result, plain     | one scalar |
| random or filling, in place            | an empty full tensor            | the shard                  | none       |
| everything else (`p[0]`, `p @ q`, svd) | the gathered full tensor        | plain tensors, views of it | one gather |

A view of a gathered full tensor (`p[0]`, `p.T`, `p.view(-1)`) is a `GatheredView`: writes to the view are copied back
into the shard, and using the view after the shard has changed raises. Plain DTensors are not safe for user code:
in torch 2.13 `p.norm().item()` is this rank's number, and `p[0].zero_()` is lost.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lightning_parallel.techniques.tools.absent import is_in_place
from lightning_parallel.techniques.tools.shards import (
    TensorT,
    as_shard,
    copy_user_attributes,
    full_tensor_of,
    shard_of,
    shards_dim,
)

METADATA_OPS = frozenset(
    (
        *("size", "dim", "numel", "nelement", "ndimension", "stride", "is_contiguous", "element_size", "get_device"),
        *("is_floating_point", "is_complex", "is_signed", "is_same_size", "storage_offset", "has_names", "__len__"),
        *("__hash__", "is_shared", "is_pinned", "detach", "requires_grad_", "retain_grad", "register_hook", "grad"),
        *("register_post_accumulate_grad_hook", "backward", "to_local", "redistribute"),
    )
)
"""Functions that run on the DTensor itself: they need no values, or belong to autograd."""

COPIES = frozenset(
    (
        *("clone", "to", "float", "double", "half", "bfloat16", "type", "contiguous", "zero_", "fill_", "copy_"),
        *("zeros_like", "ones_like", "empty_like", "full_like"),
    )
)
"""Operations that act on each element by itself although torch does not tag them as pointwise."""

REDUCTIONS = frozenset(
    ("sum", "mean", "prod", "any", "all", "count_nonzero", "max", "min", "amax", "amin", "norm", "vector_norm")
)

RANDOM = {
    *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"),
    *("rand_like", "randn_like", "randint_like"),
}
"""Operations that draw random numbers in place of the values of their first argument."""

OVERWRITES = RANDOM | {
    *("copy_", "new_zeros", "new_ones", "new_full", "new_empty"),
    *("kaiming_uniform_", "constant_"),  # of torch.nn.init
}
"""Operations that do not read the values of their first argument, so that it need not be gathered."""

VIEWS = frozenset(("T", "mT", "H", "mH", "real", "imag"))

OPERATORS = {
    "truediv": "div", "itruediv": "div", "rtruediv": "div", "idiv": "div", "iadd": "add", "radd": "add", "isub": "sub",
    "imul": "mul", "rmul": "mul", "ipow": "pow", "invert": "bitwise_not", "and": "bitwise_and", "or": "bitwise_or",
}  # fmt: skip
"""Name of an operator's method, without underscores -> name of the operation that it calls."""


# ---------------------------------------------------------------- between full tensors and shards


def local_of(whole: Tensor, shard: DTensor) -> Tensor:
    """Return the local tensor of `shard_of`, for tensors of the user's of any class. No communication."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        whole = whole.detach()
        return shard_of(whole if isinstance(whole, DTensor) else whole.as_subclass(Tensor), shard)._local_tensor


def gather_full(shard: DTensor) -> Tensor:
    """Gather the full tensor into new memory; differentiable. Collective over the ranks of its mesh."""
    with torch._C.DisableTorchFunctionSubclass():
        return cast(Tensor, _Gather.apply(shard))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """Gather with a gradient: all ranks compute the same with the full tensor, so each keeps its shard of it."""

    @staticmethod
    def forward(ctx: Any, shard: DTensor) -> Tensor:
        ctx.like = shard.detach()
        full = full_tensor_of(ctx.like)
        return full.clone() if _share_memory(full, shard._local_tensor) else full.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return shard_of(gradient, ctx.like)


def as_global_shard(tensor: TensorT) -> TensorT:
    """Let a DTensor and its gradient compute as the full tensor from now on; return the same object."""
    for value in (tensor, tensor.grad if tensor.is_leaf else None):
        if type(value) is DTensor:
            value.__class__ = GlobalShard
    return tensor


# ---------------------------------------------------------------- the class


class GlobalShard(DTensor):
    """Shard that computes as the full tensor: memory and placements of a DTensor, behaviour of a plain tensor."""

    __slots__ = ()

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe the shard. The values are not shown: debuggers print on one rank only."""
        return f"GlobalShard(shape={tuple(self.shape)}, dtype={self.dtype}, placements={self.placements})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the shard and its gradient, with the same placements. No communication."""
        if id(self) in memo:
            return memo[id(self)]
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            copied: Any = as_shard(self._local_tensor.clone(), self)
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, self.requires_grad)
            copy_user_attributes(copied, self)
            memo[id(self)] = copied
            gradient = self.grad
            if gradient is not None:
                copied.grad = as_shard(gradient._local_tensor.clone(), self)  # type: ignore[attr-defined]
            return as_global_shard(copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the full tensor. Collective over the ranks of the mesh."""
        with torch.no_grad():
            full: Any = gather_full(self)
        return (nn.Parameter(full, self.requires_grad) if isinstance(self, nn.Parameter) else full).__reduce_ex__(
            protocol
        )

    def __create_write_items__(self, fqn: str, object: Any) -> Any:  # noqa: A002
        """Return the items that `torch.distributed.checkpoint.save` writes for this rank's shard."""
        _require_all_parts(self)
        return super().__create_write_items__(fqn, object)

    def __create_chunk_list__(self) -> Any:
        """Return the chunks that `torch.distributed.checkpoint.load` reads for this rank's shard."""
        _require_all_parts(self)
        return super().__create_chunk_list__()  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the module's docstring."""
        kwargs, name = kwargs or {}, func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            return _attribute(func, name, args)
        if name in METADATA_OPS:
            with torch._C.DisableTorchFunctionSubclass():
                return _as_globals(func(*args, **kwargs))
        if name == "data_ptr" or name == "untyped_storage":
            return getattr(args[0]._local_tensor, name)()
        if name == "_foreach_norm":
            lists = (*args, *kwargs.values())
            return [torch.linalg.vector_norm(tensor, *lists[1:2]) for tensor in lists[0]]
        if name not in OVERWRITES or name == "copy_":
            done, result = _on_shards(func, name, args, kwargs)
            if not done and name in REDUCTIONS:
                done, result = _reduced(func, name, args, kwargs)
            if done:
                return result
        return _on_full_tensors(func, name, args, kwargs)


def _require_all_parts(shard: DTensor) -> None:
    """Raise if a rank of the shard's mesh is not in torch's default group: a checkpoint would lack its shard.

    In hooks the default group consists of the ranks that read different samples.
    """
    default = dist.group.WORLD
    present = set[int]() if default is None else set(dist.get_process_group_ranks(default))
    if missing := sorted(set(shard.device_mesh.mesh.flatten().tolist()) - present):
        raise RuntimeError(
            f"torch.distributed.checkpoint asks for a tensor of shape {tuple(shard.shape)}. Ranks "
            f"{', '.join(map(str, missing))} hold shards of it, but only ranks {', '.join(map(str, sorted(present)))} "
            "are in the default group of this hook. Enter trainer.strategy.full_parameters() on all ranks and save on "
            "one (if trainer.is_global_zero: save(..., no_dist=True)), or call trainer.save_checkpoint, to which all "
            "ranks write their shards with checkpoint='sharded'"
        )


def _as_globals(values: Any) -> Any:
    """Let the DTensors among `values` compute as full tensors from now on; return the same values."""
    for value in tree_leaves(values):
        if type(value) is DTensor:
            value.__class__ = GlobalShard
    return values


@functools.cache
def _is_elementwise(name: str) -> bool:
    """Return whether an operation of this name computes every element by itself, by the tags of torch's operations."""
    if name in COPIES:
        return True
    base = name.removeprefix("_foreach_").strip("_")
    base = OPERATORS.get(base, base)
    for candidate in (base, base + "_"):
        packet = getattr(torch.ops.aten, candidate, None)
        tags = [getattr(packet, overload).tags for overload in packet.overloads()] if packet is not None else []
        # tagged too, but ranks that draw for their shards alone do not get the numbers of the full tensor
        is_random = any(torch.Tag.nondeterministic_seeded in each for each in tags)
        if not is_random and any(torch.Tag.pointwise in each for each in tags):
            return True
    return False


def _on_shards(func: Any, name: str, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Compute an elementwise operation on local shards; return whether all ranks could do that, and the result.

    In a `_foreach_` operation the k-th tensors of all lists must have the same placements.
    """
    if not (_is_elementwise(name) or name.startswith("_fused_")):
        return False, None
    leaves, tree = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if name in ("max", "min", "where") and len(tensors) < 2:  # max(tensor, dim), where(condition) reduce
        return False, None
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
    # the k-th row has the k-th tensor of each list of a `_foreach_` operation
    rows = zip(*lists, strict=False) if name.startswith(("_foreach_", "_fused_")) and lists else [tensors]
    for row in rows:
        shards = [tensor for tensor in row if isinstance(tensor, GlobalShard)]
        layouts = {(shard.shape, shard.placements, shard.device_mesh) for shard in shards if shard.dim()}
        plain = [tensor for tensor in row if not isinstance(tensor, GlobalShard) and tensor.dim()]
        if len(layouts) > 1 or (shards and plain):
            return False, None
    differentiates = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    with torch._C.DisableTorchFunctionSubclass():
        if differentiates and is_in_place(name):  # autograd raises if this is not allowed
            return True, _as_globals(func(*args, **kwargs))
        return _mapped(func, name, leaves, tree, differentiates)


def _mapped(func: Any, name: str, leaves: list[Any], tree: Any, differentiates: bool) -> tuple[bool, Any]:
    """Run an operation on local shards; return whether its results are shards again, and these results."""
    shards = [leaf for leaf in leaves if isinstance(leaf, GlobalShard)]
    parts = {id(shard): shard.to_local() if differentiates else shard._local_tensor for shard in shards}
    args, kwargs = tree_unflatten([parts.get(id(leaf), leaf) for leaf in leaves], tree)
    values, values_tree = tree_flatten(func(*args, **kwargs))
    owners = {id(parts[id(shard)]): shard for shard in shards}
    positional, named = tree_unflatten(leaves, tree)
    first = list(positional[:1] or named.values())[:1]
    # the k-th result of a `_foreach_` operation belongs to the k-th tensor of its first list
    likes = first[0] if name.startswith("_foreach_") and len(values) > 1 else [shards[0]] * len(values)
    results: list[Any] = []
    for value, like in zip(values, likes, strict=True):
        if not isinstance(value, Tensor) or not isinstance(like, GlobalShard):
            results.append(value)
        elif id(value) in owners:
            results.append(owners[id(value)])
        elif value.shape != parts[id(like)].shape or value.device != parts[id(like)].device:
            return False, None  # a reduction, or a copy to another device
        elif not differentiates:
            results.append(as_global_shard(as_shard(value, like)))
        else:
            mesh, shape, stride = like.device_mesh, like.shape, like.stride()
            result = DTensor.from_local(value, mesh, like.placements, run_check=False, shape=shape, stride=stride)
            results.append(_as_globals(result))
    for shard in tree_flatten(first)[0] if is_in_place(name) else ():
        if isinstance(shard, GlobalShard):
            increment_version(shard)  # the operation wrote to the local tensor, which has another counter
    return True, tree_unflatten(results, values_tree)


def _reduced(func: Any, name: str, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Reduce all elements, first those of each rank; return whether all ranks could do that, and the number."""
    leaves = tree_flatten((args, kwargs))[0]
    shard, rest = args[0] if args else None, (*args[1:], *kwargs.values())
    orders = rest if name in ("norm", "vector_norm") else ()
    if not isinstance(shard, GlobalShard) or len(leaves) > 1 + len(orders) or "dim" in kwargs:
        return False, None
    if any(not isinstance(order, (int, float, str)) for order in orders) or len(orders) > 1:
        return False, None
    ordinary = all(type(place) in (Shard, Replicate, _StridedShard) for place in shard.placements)
    if not ordinary or shard._local_tensor.device.type != shard.device_mesh.device_type:
        return False, None
    axis_sizes: dict[int, list[int]] = {}  # sharded dimension -> sizes of the mesh axes that shard it
    for axis, place in enumerate(shard.placements):
        if shards_dim(place):
            axis_sizes.setdefault(place.dim, []).append(shard.device_mesh.size(axis))  # type: ignore[attr-defined]
    is_even = all(shard.shape[dim] % prod(ranks) == 0 for dim, ranks in axis_sizes.items())
    if not is_even and (name not in ("sum", "any", "all", "count_nonzero", "norm", "vector_norm") or orders):
        return False, None  # the shard of a rank may be empty, and has no maximum then
    low = shard.is_floating_point() and shard.element_size() < 4  # partial results would be rounded
    with torch._C.DisableTorchFunctionSubclass():
        number = func(shard.float() if low else shard, *args[1:], **kwargs)  # partial
        if not isinstance(number, DTensor) or number.dim():
            return False, None
        for axis in range(number.device_mesh.ndim):  # one at a time: torch warns about several at once
            placements = [*[Replicate()] * (axis + 1), *number.placements[axis + 1 :]]
            number = number.redistribute(placements=placements)
        number = number.to_local()
        return True, number.to(shard.dtype) if low and number.is_floating_point() else number


def _on_full_tensors(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Compute an operation on gathered full tensors, and copy those that it changed back into the shards."""
    leaves, tree = tree_flatten((args, kwargs))
    target = leaves[0] if is_in_place(name) else None
    is_trainable_leaf = (
        isinstance(target, GlobalShard) and target.is_leaf and target.requires_grad and torch.is_grad_enabled()
    )
    if is_trainable_leaf and getattr(func, "__module__", "") != "torch.nn.init":  # init disables gradients
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    sources: dict[int, _Source] = {}
    for leaf in leaves:
        if isinstance(leaf, GlobalShard) and id(leaf) not in sources:
            overwritten = leaf is leaves[0] and name in OVERWRITES and sum(each is leaf for each in leaves) == 1
            full = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) if overwritten else gather_full(leaf)
            sources[id(leaf)] = _Source(leaf, full, leaf._local_tensor._version)
    versions = [source.whole._version for source in sources.values()]
    args, kwargs = tree_unflatten([sources[id(x)].whole if id(x) in sources else x for x in leaves], tree)
    result = func(*args, **kwargs)
    for source, version in zip(sources.values(), versions, strict=True):
        if source.whole._version != version or source.shard is target:
            source.write_back()
    if isinstance(result, np.ndarray):
        result.setflags(write=False)  # writes to the array would not reach the shards
    return tree_map_only(Tensor, lambda made: _wrap_result(made, sources.values()), result)


def _wrap_result(tensor: Tensor, sources: Iterable[_Source]) -> Tensor:
    """Return a result to the user: the shard for its full tensor, a `GatheredView` for a view of one."""
    for source in sources:
        if tensor is source.whole:
            return cast(Tensor, source.shard)
        if _share_memory(tensor, source.whole):
            view: GatheredView = tensor.as_subclass(GatheredView)
            view.source = source
            return view
    return tensor


def _attribute(func: Any, name: str, args: Any) -> Any:
    """Get, set or delete an attribute, such as `data` or `grad`."""
    attribute, shard = func.__self__.__name__, args[0]
    if attribute in VIEWS:
        return _on_full_tensors(func, name, args, {})
    if name == "__set__" and attribute in ("data", "grad") and isinstance(args[1], Tensor):
        value = args[1]
        casts = attribute == "data" and value.dtype != shard.dtype
        if value.shape != shard.shape or (casts and isinstance(shard, nn.Parameter)):
            raise RuntimeError(
                f".{attribute} is set to a tensor of shape {tuple(value.shape)} and {value.dtype}, but the sharded "
                f"parameter has shape {tuple(shard.shape)} and {shard.dtype}; these are fixed when the run begins, so "
                "change them before"
            )
        if not isinstance(value, DTensor):
            value = as_global_shard(as_shard(local_of(value, shard), shard))
        elif value.placements != shard.placements or value.device_mesh != shard.device_mesh:
            value = as_global_shard(as_shard(local_of(gather_full(value), shard), shard))
        if attribute == "data":
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                if casts:  # only of a gradient, as `module.to(dtype)` sets its data
                    func(shard, value)
                    shard._local_tensor, shard._spec = value._local_tensor, value._spec
                else:
                    shard._local_tensor.copy_(value._local_tensor)
            return None
        args = shard, value
    with torch._C.DisableTorchFunctionSubclass():
        return _as_globals(func(*args))


# ---------------------------------------------------------------- views of gathered full tensors


@dataclass
class _Source:
    """A full tensor and the shard from which it was gathered."""

    shard: Any
    whole: Tensor
    version: int  # of the local tensor when the full one was gathered or written back: a later one makes views stale

    def write_back(self) -> None:
        """Copy this rank's part of the full tensor into the shard. No communication."""
        part = local_of(self.whole, self.shard)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self.shard._local_tensor.copy_(part)
            increment_version(self.shard)
        self.version = self.shard._local_tensor._version


class GatheredView(Tensor):
    """View of a gathered full tensor: reads are local, writes are copied back into the shard, stale views raise."""

    source: _Source

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.Tensor`. Computes on the memory of the gathered full tensor."""
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        views = [leaf for leaf in leaves if isinstance(leaf, GatheredView)]
        with torch._C.DisableTorchFunctionSubclass():
            for view in views:
                if view.source.shard._local_tensor._version != view.source.version:
                    raise RuntimeError(
                        "a view of a sharded parameter or gradient is used after the tensor has changed; take the view "
                        "again, or clone() it where the old values are meant"
                    )
            versions = [view._version for view in views]
            args, kwargs = tree_map_only(GatheredView, lambda view: view.as_subclass(Tensor), (args, kwargs))
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            for view, version in zip(views, versions, strict=True):
                if view._version != version:
                    view.source.write_back()
            return tree_map_only(Tensor, lambda made: _wrap_result(made, [view.source for view in views]), result)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two plain tensors use the same storage."""
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(a, DTensor) or isinstance(b, DTensor) or a.is_meta or a.layout != torch.strided:
            return False
        return a.numel() > 0 and a.untyped_storage()._cdata == b.untyped_storage()._cdata
