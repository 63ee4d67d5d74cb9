"""A shard of a parameter or a gradient that computes as the whole tensor, for code that runs between steps.

Where ranks hold shards, user code between steps (hooks, callbacks, loggers, averages of weights) sees tensors of the
class `GlobalShard`. All ranks must run the same operations on them, as with any collective. There are four kinds:

| operation                              | computed on                 | returns                     | messages   |
|----------------------------------------|-----------------------------|-----------------------------|------------|
| elementwise, by torch's tag            | the shards, if cut alike    | a `GlobalShard`             | none       |
| a reduction of all elements            | shards, then over the ranks | the whole's number, plain   | one scalar |
| random or filling, in place            | an empty whole              | the shard                   | none       |
| everything else (`p[0]`, `p @ q`, svd) | the gathered whole          | plain tensors, views of it  | one gather |

A view of a gathered whole (`p[0]`, `p.T`, `p.view(-1)`) is a `GatheredView`: what is written to the view goes back into
the shard, and a view that is used after the shard has changed raises. Plain DTensors are not safe for user code:
in torch 2.13 `p.norm().item()` is this rank's number, and `p[0].zero_()` is lost.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lightning_parallel.techniques.tools.absent import is_in_place
from lightning_parallel.techniques.tools.shards import as_shard, bear, divides, shard_of, whole_tensor

TensorT = TypeVar("TensorT", bound=Tensor)

ABOUT = frozenset(
    (
        *("size", "dim", "numel", "nelement", "ndimension", "stride", "is_contiguous", "element_size", "get_device"),
        *("is_floating_point", "is_complex", "is_signed", "is_same_size", "storage_offset", "has_names", "__len__"),
        *("__hash__", "is_shared", "is_pinned", "detach", "requires_grad_", "retain_grad", "register_hook", "grad"),
        *("register_post_accumulate_grad_hook", "backward", "to_local", "redistribute"),
    )
)
"""Operations on the shard as it is: they ask for no values, or belong to autograd."""

COPIES = frozenset(
    (
        *("clone", "to", "float", "double", "half", "bfloat16", "type", "contiguous", "zero_", "fill_", "copy_"),
        *("zeros_like", "ones_like", "empty_like", "full_like"),
    )
)
"""Operations beside torch's elementwise ones that act on each element by itself."""

REDUCTIONS = frozenset(
    ("sum", "mean", "prod", "any", "all", "count_nonzero", "max", "min", "amax", "amin", "norm", "vector_norm")
)

OVERWRITES = frozenset(
    (
        *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"),
        *("copy_", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones", "new_full", "new_empty"),
        *("kaiming_uniform_", "constant_"),  # of torch.nn.init
    )
)
"""Operations that do not read the values of their first argument."""

VIEWS = frozenset(("T", "mT", "H", "mH", "real", "imag"))

OPERATORS = {
    "truediv": "div", "itruediv": "div", "rtruediv": "div", "idiv": "div", "iadd": "add", "radd": "add", "isub": "sub",
    "imul": "mul", "rmul": "mul", "ipow": "pow", "invert": "bitwise_not", "and": "bitwise_and", "or": "bitwise_or",
}  # fmt: skip
"""Names of operators, and of the operations that they call."""


# ---------------------------------------------------------------- between wholes and shards


def local_of(whole: Tensor, shard: DTensor) -> Tensor:
    """Return this rank's part of a whole tensor, cut as `shard` is. No message."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return shard_of(whole.detach().as_subclass(Tensor), shard)._local_tensor


def whole_of(shard: DTensor) -> Tensor:
    """Gather the whole tensor, with memory of its own; differentiable. Collective over the ranks of its mesh."""
    with torch._C.DisableTorchFunctionSubclass():
        return cast(Tensor, _Gather.apply(shard))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """The whole of a shard. All ranks compute alike with it, so each keeps its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, shard: DTensor) -> Tensor:
        ctx.like = shard.detach()
        whole = whole_tensor(ctx.like)
        return whole.clone() if _share_memory(whole, shard._local_tensor) else whole.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return shard_of(gradient, ctx.like)


def global_of(tensor: TensorT) -> TensorT:
    """The same tensor, which computes as the whole from now on, with its gradient, if it is a DTensor."""
    for each in (tensor, tensor.grad if tensor.is_leaf else None):
        if type(each) is DTensor:
            each.__class__ = GlobalShard
    return tensor


# ---------------------------------------------------------------- the class


class GlobalShard(DTensor):
    """A shard that computes as the whole tensor: a DTensor's memory and placements with a plain tensor's behaviour."""

    __slots__ = ()

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe the shard. The values are not shown: debuggers print on one rank only."""
        return f"GlobalShard(shape={tuple(self.shape)}, dtype={self.dtype}, placements={self.placements})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the shard: the copy is cut alike, and its gradient too. No message."""
        if id(self) in memo:
            return memo[id(self)]
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            copied: Any = as_shard(self._local_tensor.clone(), self)
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, self.requires_grad)
            copied.__class__ = GlobalShard
            bear(copied, self)
            memo[id(self)] = copied
            gradient = self.grad
            if gradient is not None:
                copied.grad = _like(gradient._local_tensor.clone(), self)  # type: ignore[attr-defined]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the whole. Collective."""
        with torch.no_grad():
            whole: Any = whole_of(self)
        return (nn.Parameter(whole, self.requires_grad) if isinstance(self, nn.Parameter) else whole).__reduce_ex__(
            protocol
        )

    def __create_write_items__(self, fqn: str, object: Any) -> Any:  # noqa: A002
        """What `torch.distributed.checkpoint.save` writes of the tensor."""
        _require_all_parts(self)
        return super().__create_write_items__(fqn, object)

    def __create_chunk_list__(self) -> Any:
        """What `torch.distributed.checkpoint.load` reads of the tensor."""
        _require_all_parts(self)
        return super().__create_chunk_list__()  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the module's docstring."""
        kwargs, name = kwargs or {}, func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            return _attribute(func, name, args)
        if name in ABOUT:
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
        return _on_wholes(func, name, args, kwargs)


def _require_all_parts(shard: DTensor) -> None:
    """Raise where ranks with parts of a tensor are not in torch's default group: a checkpoint would lack these parts.

    In hooks the default group has the ranks that read different samples.
    """
    default = dist.group.WORLD
    present = set[int]() if default is None else set(dist.get_process_group_ranks(default))
    if missing := sorted(set(shard.device_mesh.mesh.flatten().tolist()) - present):
        raise RuntimeError(
            f"torch.distributed.checkpoint asks for a tensor of shape {tuple(shard.shape)} of which ranks "
            f"{', '.join(map(str, missing))} hold parts, but only ranks {', '.join(map(str, sorted(present)))} take "
            "part in what this hook calls; enter trainer.strategy.full_parameters() on all ranks and save there on one "
            "(if trainer.is_global_zero: save(..., no_dist=True)), or call trainer.save_checkpoint, to which all ranks "
            "write their parts with checkpoint='sharded'"
        )


def _like(part: Tensor, shard: DTensor) -> DTensor:
    """A local tensor as this rank's part of a tensor that is cut as `shard` is."""
    made = as_shard(part, shard)
    made.__class__ = GlobalShard
    return made


def _as_globals(values: Any) -> Any:
    """The same values, in which DTensors compute as the whole from now on."""
    for value in tree_leaves(values):
        if type(value) is DTensor:
            value.__class__ = GlobalShard
    return values


@functools.cache
def _is_elementwise(name: str) -> bool:
    """Whether an operation of this name computes every element by itself, by the tags of torch's own operations."""
    if name in COPIES:
        return True
    base = name.removeprefix("_foreach_").strip("_")
    base = OPERATORS.get(base, base)
    for candidate in (base, base + "_"):
        packet = getattr(torch.ops.aten, candidate, None)
        tags = [getattr(packet, overload).tags for overload in packet.overloads()] if packet is not None else []
        drawn = any(torch.Tag.nondeterministic_seeded in each for each in tags)
        if not drawn and any(torch.Tag.pointwise in each for each in tags):
            return True
    return False


def _on_shards(func: Any, name: str, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Compute an elementwise operation on the shards; returns whether it could, the same on all ranks, and the result.

    Of a `_foreach_` operation the tensors at the same place of its lists must be cut alike.
    """
    if not (_is_elementwise(name) or name.startswith("_fused_")):
        return False, None
    leaves, tree = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if name in ("max", "min", "where") and len(tensors) < 2:  # max(tensor, dim) and where(condition) are no maps
        return False, None
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
    # of `_foreach_` operations the k-th row has the k-th tensor of each list
    rows = zip(*lists, strict=False) if name.startswith(("_foreach_", "_fused_")) and lists else [tensors]
    for row in rows:
        shards = [tensor for tensor in row if isinstance(tensor, GlobalShard)]
        cuts = {(shard.shape, shard.placements, shard.device_mesh) for shard in shards if shard.dim()}
        plain = [tensor for tensor in row if not isinstance(tensor, GlobalShard) and tensor.dim()]
        if len(cuts) > 1 or (shards and plain):
            return False, None
    differentiates = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if differentiates and is_in_place(name):  # autograd decides whether this is allowed
        with torch._C.DisableTorchFunctionSubclass():
            return True, _as_globals(func(*args, **kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return _mapped(func, name, leaves, tree, differentiates)


def _mapped(func: Any, name: str, leaves: list[Any], tree: Any, differentiates: bool) -> tuple[bool, Any]:
    shards = [leaf for leaf in leaves if isinstance(leaf, GlobalShard)]
    parts = {id(shard): shard.to_local() if differentiates else shard._local_tensor for shard in shards}
    args, kwargs = tree_unflatten([parts.get(id(leaf), leaf) for leaf in leaves], tree)
    made, made_tree = tree_flatten(func(*args, **kwargs))
    owners = {id(parts[id(shard)]): shard for shard in shards}
    given, named = tree_unflatten(leaves, tree)
    first = list(given[:1] or named.values())[:1]
    # the k-th result of a `_foreach_` operation belongs to the k-th tensor of its first list
    likes = first[0] if name.startswith("_foreach_") and len(made) > 1 else [shards[0]] * len(made)
    results: list[Any] = []
    for value, like in zip(made, likes, strict=True):
        if not isinstance(value, Tensor) or not isinstance(like, GlobalShard):
            results.append(value)
        elif id(value) in owners:
            results.append(owners[id(value)])
        elif value.shape != parts[id(like)].shape or value.device != parts[id(like)].device:
            return False, None  # it was a reduction, or it moved to another device
        elif not differentiates:
            results.append(_like(value, like))
        else:
            mesh, shape, stride = like.device_mesh, like.shape, like.stride()
            whole = DTensor.from_local(value, mesh, like.placements, run_check=False, shape=shape, stride=stride)
            results.append(_as_globals(whole))
    for shard in tree_flatten(first)[0] if is_in_place(name) else ():
        if isinstance(shard, GlobalShard):
            increment_version(shard)  # autograd's own counter: the operation wrote below it
    return True, tree_unflatten(results, made_tree)


def _reduced(func: Any, name: str, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Reduce all elements by a partial result on each rank; returns whether that could be, and the number."""
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
    placed: dict[int, list[int]] = {}  # by dimension, over how many ranks its axes divide it
    for axis, place in enumerate(shard.placements):
        if divides(place):
            placed.setdefault(place.dim, []).append(shard.device_mesh.size(axis))  # type: ignore[attr-defined]
    is_even = all(shard.shape[dim] % prod(ranks) == 0 for dim, ranks in placed.items())
    if not is_even and (name not in ("sum", "any", "all", "count_nonzero", "norm", "vector_norm") or orders):
        return False, None  # a rank without elements has no maximum
    low = shard.is_floating_point() and shard.element_size() < 4  # summands of ranks would be rounded
    with torch._C.DisableTorchFunctionSubclass():
        number = func(shard.float() if low else shard, *args[1:], **kwargs)  # a partial one on each rank
        if not isinstance(number, DTensor) or number.dim():
            return False, None
        for axis in range(number.device_mesh.ndim):  # one by one: torch warns of several in one redistribution
            places = [*[Replicate()] * (axis + 1), *number.placements[axis + 1 :]]
            number = number.redistribute(placements=places)
        number = number.to_local()
        return True, number.to(shard.dtype) if low and number.is_floating_point() else number


def _on_wholes(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Compute an operation on gathered wholes; what it changed of them goes back into the shards."""
    leaves, tree = tree_flatten((args, kwargs))
    target = leaves[0] if is_in_place(name) else None
    learns = isinstance(target, GlobalShard) and target.is_leaf and target.requires_grad and torch.is_grad_enabled()
    if learns and getattr(func, "__module__", "") != "torch.nn.init":  # which turns gradients off by itself
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    sources: dict[int, _Source] = {}
    for leaf in leaves:
        if isinstance(leaf, GlobalShard) and id(leaf) not in sources:
            overwritten = leaf is leaves[0] and name in OVERWRITES and sum(each is leaf for each in leaves) == 1
            whole = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) if overwritten else whole_of(leaf)
            sources[id(leaf)] = _Source(leaf, whole, leaf._local_tensor._version)
    before = [source.whole._version for source in sources.values()]
    args, kwargs = tree_unflatten([sources[id(x)].whole if id(x) in sources else x for x in leaves], tree)
    result = func(*args, **kwargs)
    for source, version in zip(sources.values(), before, strict=True):
        if source.whole._version != version or source.shard is target:
            source.write_back()
    if isinstance(result, np.ndarray):
        result.setflags(write=False)  # what is written there would not come back
    return tree_map_only(Tensor, lambda made: _given_back(made, sources.values()), result)


def _given_back(tensor: Tensor, sources: Iterable[_Source]) -> Tensor:
    for source in sources:
        if tensor is source.whole:
            return cast(Tensor, source.shard)
        if _share_memory(tensor, source.whole):
            view: GatheredView = tensor.as_subclass(GatheredView)
            view.source = source
            return view
    return tensor


def _attribute(func: Any, name: str, args: Any) -> Any:
    """Read or write an attribute, such as `data` or `grad`."""
    attribute, shard = func.__self__.__name__, args[0]
    if attribute in VIEWS:
        return _on_wholes(func, name, args, {})
    if name == "__set__" and attribute in ("data", "grad") and isinstance(args[1], Tensor):
        value = args[1]
        casts = attribute == "data" and value.dtype != shard.dtype
        if value.shape != shard.shape or (casts and isinstance(shard, nn.Parameter)):
            raise RuntimeError(
                f".{attribute} = a tensor of shape {tuple(value.shape)} and {value.dtype} for a sharded parameter of "
                f"shape {tuple(shard.shape)} and {shard.dtype}: ranks hold parts of what the model had when the run "
                "began; change shapes and dtypes before the run"
            )
        if not isinstance(value, DTensor):
            value = _like(local_of(value, shard), shard)
        elif value.placements != shard.placements or value.device_mesh != shard.device_mesh:
            value = _like(local_of(whole_of(value), shard), shard)
        if attribute == "data":
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                if casts:  # a gradient, of a module that is cast
                    func(shard, value)
                    shard._local_tensor, shard._spec = value._local_tensor, value._spec
                else:
                    shard._local_tensor.copy_(value._local_tensor)
            return None
        args = shard, value
    with torch._C.DisableTorchFunctionSubclass():
        return _as_globals(func(*args))


# ---------------------------------------------------------------- views of gathered wholes


@dataclass
class _Source:
    """A gathered whole, the shard that it was gathered from, and the version that the shard had."""

    shard: Any
    whole: Tensor
    version: int

    def write_back(self) -> None:
        """Copy this rank's part of the whole into the shard."""
        part = local_of(self.whole, self.shard)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self.shard._local_tensor.copy_(part)
            increment_version(self.shard)
        self.version = self.shard._local_tensor._version


class GatheredView(Tensor):
    """A view of a gathered whole: reads are local, writes go back into the shard, stale views raise."""

    source: _Source

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the gathered whole's memory."""
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
            before = [view._version for view in views]
            args, kwargs = tree_map_only(GatheredView, lambda view: view.as_subclass(Tensor), (args, kwargs))
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            for view, version in zip(views, before, strict=True):
                if view._version != version:
                    view.source.write_back()
            return tree_map_only(Tensor, lambda made: _given_back(made, [view.source for view in views]), result)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(a, DTensor) or isinstance(b, DTensor) or a.is_meta or a.layout != torch.strided:
            return False
        return a.numel() > 0 and a.untyped_storage()._cdata == b.untyped_storage()._cdata
