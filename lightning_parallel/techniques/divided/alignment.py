"""Alignment of the tensors of one operation: what each rank computes with, and which elements of the result it gets.

Where ranks shard the result of an operation along a dimension, an input tensor of the operation is used like this:

| has this dimension | and is | each rank computes with |
|---|---|---|
| yes | sharded the same way | its local shard |
| yes | plain | the elements at the same positions (`part`, if it requires a gradient) |
| yes | sharded another way | the same elements of the full tensor (`joined`) |
| no, or broadcast | plain | the tensor itself (`entered`, if it requires a gradient) |
| yes or no | a parameter, averaged when the step ends | the same, its gradient multiplied by the number of ranks |
| no | sharded by these ranks along another dimension | the full tensor, another part on each rank (`gathered`) |

If two tensors shard one dimension in two ways, the sharding of the last one is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.collectives.conjugate_collectives import (
    defer_gradient_average,
    entered,
    gathered,
    has_deferred_average,
    joined,
    part,
    total,
    total_part,
)
from lightning_parallel.collectives.derived_cache import checkpoint_token, version
from lightning_parallel.collectives.elements import Elements, Ranks
from lightning_parallel.techniques.divided.metadata import state_of
from lightning_parallel.techniques.divided.table import Cuts
from lightning_parallel.techniques.divided.tensor import Divided, is_divided

Label = Hashable
"""Name of a dimension in an operation: dimensions of the same name are aligned, as the letters of an einsum."""


def names_in_step(tensors: Sequence[Any], dims: int) -> list[list[Label]]:
    """Return the names of the dimensions of tensors that are combined element by element, with torch's broadcasting.

    E.g. [[0, 1], [1], [0, None]] for tensors of shape [8, 4], [4] and [8, 1], with `dims` 2.

    Args:
        tensors: the arguments; one that is no tensor has no names.
        dims: the number of dimensions of the result; the names are their numbers, None for a broadcast dimension.
    """
    named = [range(dims - t.dim(), dims) if isinstance(t, Tensor) else () for t in tensors]
    return [[n if t.shape[k] != 1 else None for k, n in enumerate(name)] if isinstance(t, Tensor) else []
            for t, name in zip(tensors, named, strict=True)]  # fmt: skip


def align_shardings(
    tensors: Sequence[Any], names: Sequence[Sequence[Label]], dtype: torch.dtype | None = None
) -> tuple[list[Any], dict[Any, Elements]] | None:
    """Align the tensors of an operation, in which dimensions of the same name run along each other.

    If the same ranks shard two dimensions, or one dimension is sharded in two ways, the last sharded tensor (the weight
    of a product) stays as it is, and conflicting shardings are gathered. Collective over the ranks of these.

    E.g. for X [T, H] @ W [H, F], with X sharded along T and W along F by the same ranks, X is gathered, and the result
    is sharded along F.

    Args:
        tensors: the arguments of the operation; one that is no tensor stays as it is.
        names: of the dimensions of each; None for a broadcast dimension.
        dtype: float32 tensors are cast to it before they are sent, as autocast would do afterwards; None keeps them.

    Returns:
        The local tensor for each argument, and the elements by name of dimension; None if a broadcast one is sharded.
    """
    cuts: dict[Any, Elements] = {}
    sharding_ranks: set[Ranks] = set()
    for tensor, labels in zip(reversed(tensors), reversed(names), strict=True):
        if is_divided(tensor):
            for dim, elements in tensor.cuts.items():
                if labels[dim] is None:
                    return None
                if labels[dim] not in cuts and elements.ranks not in sharding_ranks:
                    cuts[labels[dim]] = elements
                    sharding_ranks.add(elements.ranks)
    aligned = [
        aligned_local(t, n, cuts, dtype) if isinstance(t, Tensor) else t for t, n in zip(tensors, names, strict=True)
    ]
    return aligned, cuts


def shared_sharding(tensors: Sequence[Any], names: Sequence[Sequence[Label]]) -> dict[Any, Elements] | None:
    """Return the elements by name of dimension if no tensor has to be aligned, which is the usual case; else None.

    All sharded tensors then have the same sharding, along one name. Plain tensors, such as a mask, lack this name, and
    require no gradient, unless their gradients become means at the end of the step, as those of a norm's weight.
    """
    shared: list[tuple[Label, Elements]] = []
    for tensor, labels in zip(tensors, names, strict=True):
        if is_divided(tensor):
            (dim, cut), *more = tensor.cuts.items()
            if more or labels[dim] is None or (shared and (cut is not shared[0][1] or labels[dim] != shared[0][0])):
                return None
            shared.append((labels[dim], cut))
    if not shared:
        return None
    name, elements = shared[0]
    for tensor, labels in zip(tensors, names, strict=True):
        if is_divided(tensor) or not isinstance(tensor, Tensor):
            continue
        if name in labels or (needs_grad(tensor) and not has_deferred_average(tensor, elements.ranks)):
            return None
    return {name: elements}


def aligned_local(
    tensor: Tensor, names: Sequence[Label], cuts: Mapping[Any, Elements], dtype: torch.dtype | None = None
) -> Tensor:
    """Return the tensor that this rank computes with for one input of an operation. May be a collective.

    Args:
        tensor: plain or `Divided`.
        names: of its dimensions; None for a broadcast dimension.
        cuts: the elements of all inputs together, by name of dimension.
        dtype: see `align_shardings`.

    Raises:
        ValueError: the size of a dimension is not that of the elements it is aligned with.
    """
    result = tensor
    kept_dims: set[int] = set()
    has_entered: set[Ranks] = set()
    if is_divided(tensor):
        conflicts = {dim: each for dim, each in tensor.cuts.items() if not each.same(cuts.get(names[dim]))}
        if conflicts and tensor.known is not None:
            result, tensor = tensor.known, tensor.known
        else:
            result, kept_dims = tensor.own, set(tensor.cuts) - set(conflicts)
            for dim, elements in conflicts.items():  # gather these dimensions
                meets = [name for name, each in cuts.items() if each.ranks is elements.ranks]
                if meets and meets[0] not in names:  # each rank uses another part, and gets a partial gradient
                    result = gathered_once(tensor, result, dim, elements, dtype)
                    has_entered.add(elements.ranks)
                else:
                    result = joined(result, dim, elements)
    for name, elements in cuts.items():
        ranks, position, is_averaged = elements.ranks, names.index(name) if name in names else None, False
        if ranks.averages is not None:  # whether it is a parameter whose gradients are averaged at the end of the step
            is_parameter = tensor.stored is not None if is_divided(tensor) else type(tensor) is nn.Parameter
            compiles = torch.compiler.is_dynamo_compiling()
            is_averaged = is_parameter and (is_divided(tensor) or compiles or ranks.averages(tensor))
        if is_averaged:
            result = defer_gradient_average(result, ranks)
            result = result if position is None else elements.take(result, position)
        elif position is None:
            result = result if ranks in has_entered else enter_once(result, ranks, dtype)
        elif position not in kept_dims:
            result = _part_of_whole(result, position, elements, ranks in has_entered)
    return result


def _part_of_whole(whole: Tensor, dim: int, elements: Elements, has_entered: bool) -> Tensor:
    if whole.shape[dim] != elements.size:
        raise ValueError(f"a tensor of shape {tuple(whole.shape)} does not match {elements!r} in dimension {dim}")
    if not needs_grad(whole):
        make = elements.ranks.derivations.plain(whole)
        # A copy, as a view would keep the full tensor alive until backward.
        return make.get(("elements", elements, dim), lambda: elements.take(whole, dim).clone())
    if not has_entered and not has_deferred_average(whole, elements.ranks):
        return part(whole, dim, elements)
    return elements.take(whole if has_entered else defer_gradient_average(whole, elements.ranks), dim)


def gathered_once(divided: Any, own: Tensor, dim: int, elements: Elements, dtype: torch.dtype | None) -> Tensor:
    """Gather a tensor along `dim`; each rank then uses another part. Gathered once for all operations that read it."""
    if own is not divided.own:
        return gathered(in_dtype(own, dtype), dim, elements)
    gathers: dict[Any, Tensor] = divided.gathers
    key = dim, torch.is_grad_enabled(), dtype, state_of(own)
    if key not in gathers:
        gathers[key] = gathered(in_dtype(own, dtype), dim, elements)
    return gathers[key]


def in_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast a tensor as a product under autocast would, but before it is sent: half the bytes."""
    return tensor if dtype is None or tensor.dtype != torch.float32 else tensor.to(dtype)


def needs_grad(tensor: Tensor) -> bool:
    """Whether gradients flow to a tensor."""
    return tensor.requires_grad and torch.is_grad_enabled()


def enter_once(tensor: Tensor, ranks: Ranks, dtype: torch.dtype | None = None) -> Tensor:
    """Return a replicated tensor for local use: identity in forward, all-reduce of its gradient in backward.

    Consecutive calls with the same tensor, as by the projections of queries, keys and values, return the same result,
    and so share one all-reduce.
    """
    if not needs_grad(tensor):
        return tensor
    if torch.compiler.is_dynamo_compiling():
        last_traced = ranks.last_in_graph
        if last_traced is None or last_traced[0] is not tensor or last_traced[1] != dtype:
            last_traced = ranks.last_in_graph = tensor, dtype, entered(in_dtype(tensor, dtype), ranks)
        return last_traced[2]
    is_mean = has_deferred_average(tensor, ranks)
    last: Any = ranks.last_entered
    state = version(tensor), dtype, checkpoint_token()
    if last is not None and last[0]() is tensor and last[1] == state:
        previous: Tensor = last[2]
        return previous
    result = (
        in_dtype(defer_gradient_average(tensor, ranks), dtype) if is_mean else entered(in_dtype(tensor, dtype), ranks)
    )
    ranks.last_entered = weakref.ref(tensor, ranks.forget), state, result
    return result


def as_divided(own: Tensor, cuts: Cuts | None) -> Tensor:
    """Return a `Divided` tensor with this local shard; without cuts the plain tensor, which is replicated."""
    return Divided(own, cuts) if cuts else own


def reduce_partial(summand: Tensor, ranks: Ranks, cuts: Cuts) -> Tensor:
    """Sum partial results over ranks; each rank keeps its part of the sequence if the ranks split it. A collective.

    Args:
        summand: the partial result of this rank.
        ranks: the ranks to sum over.
        cuts: of the dimensions of `summand` that are sharded already.

    Returns:
        The full sum unless it is a hidden state, [B, T, H], with at least as many positions as ranks.
    """
    dim = ranks.sequence_dim
    if dim is None or summand.dim() != 3 or dim in cuts or summand.shape[dim] < ranks.count:
        return as_divided(total(summand, ranks), cuts)
    elements = ranks.chunks(summand.shape[dim])
    return Divided(total_part(summand, dim, elements), {**cuts, dim: elements})
