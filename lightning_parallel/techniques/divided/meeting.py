"""Tensors that meet in one operation: what each rank computes with, and which elements of the result it then has.

Where a result is divided among some ranks in one of its dimensions, a tensor that meets in it

| has this dimension | and is | gives |
|---|---|---|
| yes | divided alike | its own elements |
| yes | plain | the elements at the same places (`part`, where it learns) |
| yes | divided otherwise | the same, of the whole (`joined`) |
| no, or broadcast | plain | itself; it enters where it learns (`entered`) |
| either | a parameter, averaged later | the same, its gradient counted `count` times |
| no | divided by these ranks in another one | the whole, of which each uses another part (`gathered`) |

Of two divisions of one dimension that of the last tensor counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.collectives.by_elements import (
    averaged_later,
    becomes_mean,
    entered,
    gathered,
    joined,
    part,
    total,
    total_part,
)
from lightning_parallel.collectives.elements import Elements, Ranks
from lightning_parallel.collectives.made_of import checkpoint_around, version
from lightning_parallel.techniques.divided.looks import state_of
from lightning_parallel.techniques.divided.table import Cuts
from lightning_parallel.techniques.divided.tensor import Divided, is_divided

Label = Hashable
"""A dimension's name where tensors meet: dimensions of the same name run along each other."""


def names_in_step(tensors: Sequence[Any], dims: int) -> list[list[Label]]:
    """The names of the dimensions of tensors that meet element by element, broadcast as torch does.

    Args:
        tensors: what meets; what is no tensor has no names.
        dims: how many dimensions the result has, whose numbers are the names.
    """
    named = [range(dims - t.dim(), dims) if isinstance(t, Tensor) else () for t in tensors]
    return [[n if t.shape[k] != 1 else None for k, n in enumerate(name)] if isinstance(t, Tensor) else []
            for t, name in zip(tensors, named, strict=True)]  # fmt: skip


def brought_together(
    tensors: Sequence[Any], names: Sequence[Sequence[Label]], dtype: torch.dtype | None = None
) -> tuple[list[Any], dict[Any, Elements]] | None:
    """What each rank computes with where dimensions of the same name run along each other.

    Where the same ranks divide two dimensions, or one dimension is divided in two ways, the last tensor that is divided
    (a product's weight) stays as it is, and what does not go with it is gathered.

    Args:
        tensors: what meets; what is no tensor stays as it is.
        names: of the dimensions of each; None for one that is broadcast.
        dtype: to which tensors of single precision are turned before they are sent, as autocast would do afterwards;
            None leaves them.

    Returns:
        What stands for each tensor, and the elements by the names of dimensions; None if they cannot meet.
    """
    cuts: dict[Any, Elements] = {}
    divides: set[Ranks] = set()
    for tensor, own in zip(reversed(tensors), reversed(names), strict=True):
        if is_divided(tensor):
            for dim, elements in tensor.cuts.items():
                if own[dim] is None:
                    return None
                if own[dim] not in cuts and elements.ranks not in divides:
                    cuts[own[dim]] = elements
                    divides.add(elements.ranks)
    found = [own_part(t, n, cuts, dtype) if isinstance(t, Tensor) else t for t, n in zip(tensors, names, strict=True)]
    return found, cuts


def as_they_are(tensors: Sequence[Any], names: Sequence[Sequence[Label]]) -> dict[Any, Elements] | None:
    """The elements by the names of dimensions where nothing has to be brought, which is the usual case; else None.

    All that is divided is so alike, along one name. What is plain, as a mask, does not have this name, and does not
    learn, unless its gradients become means when the step ends, as those of a norm's weight.
    """
    found: list[tuple[Label, Elements]] = []
    for tensor, own in zip(tensors, names, strict=True):
        if is_divided(tensor):
            (dim, mine), *more = tensor.cuts.items()
            if more or own[dim] is None or (found and (mine is not found[0][1] or own[dim] != found[0][0])):
                return None
            found.append((own[dim], mine))
    if not found:
        return None
    name, elements = found[0]
    for tensor, own in zip(tensors, names, strict=True):
        if is_divided(tensor) or not isinstance(tensor, Tensor):
            continue
        if name in own or (learns(tensor) and not becomes_mean(tensor, elements.ranks)):
            return None
    return {name: elements}


def own_part(
    tensor: Tensor, names: Sequence[Label], cuts: Mapping[Any, Elements], dtype: torch.dtype | None = None
) -> Tensor:
    """What a rank computes with of one tensor.

    Args:
        tensor: plain or divided.
        names: of its dimensions; None for one that is broadcast.
        cuts: by the names of dimensions, the elements of all that meets.
        dtype: see `brought_together`.

    Raises:
        ValueError: a dimension that has not the size of the elements it meets.
    """
    made = tensor
    stays: set[int] = set()
    has_entered: set[Ranks] = set()
    if is_divided(tensor):
        otherwise = {dim: each for dim, each in tensor.cuts.items() if not each.same(cuts.get(names[dim]))}
        if otherwise and tensor.known is not None:
            made, tensor = tensor.known, tensor.known
        else:
            made, stays = tensor.own, set(tensor.cuts) - set(otherwise)
            for place, elements in otherwise.items():  # of these dimensions with the elements of all
                meets = [name for name, each in cuts.items() if each.ranks is elements.ranks]
                if meets and meets[0] not in names:  # each rank will use another part, and has a summand of a gradient
                    made = gathered_once(tensor, made, place, elements, dtype)
                    has_entered.add(elements.ranks)
                else:
                    made = joined(made, place, elements)
    for name, elements in cuts.items():
        ranks, dim, is_averaged = elements.ranks, names.index(name) if name in names else None, False
        if ranks.averages is not None:  # whether it is a parameter whose gradients are averaged when a step ends
            is_parameter = tensor.stored is not None if is_divided(tensor) else type(tensor) is nn.Parameter
            compiles = torch.compiler.is_dynamo_compiling()
            is_averaged = is_parameter and (is_divided(tensor) or compiles or ranks.averages(tensor))
        if is_averaged:
            made = averaged_later(made, ranks)
            made = made if dim is None else elements.take(made, dim)
        elif dim is None:
            made = made if ranks in has_entered else met(made, ranks, dtype)
        elif dim not in stays:
            made = _part_of_whole(made, dim, elements, ranks in has_entered)
    return made


def _part_of_whole(whole: Tensor, dim: int, elements: Elements, has_entered: bool) -> Tensor:
    if whole.shape[dim] != elements.size:
        raise ValueError(f"a tensor of shape {tuple(whole.shape)} meets {elements!r} in dimension {dim}")
    if not learns(whole):
        make = elements.ranks.made_of.plain(whole)
        # A copy, for a view would keep the whole alive until backward.
        return make.get(("elements", elements, dim), lambda: elements.take(whole, dim).clone())
    if not has_entered and not becomes_mean(whole, elements.ranks):
        return part(whole, dim, elements)
    return elements.take(whole if has_entered else averaged_later(whole, elements.ranks), dim)


def gathered_once(divided: Any, own: Tensor, dim: int, elements: Elements, dtype: torch.dtype | None) -> Tensor:
    """The elements of all ranks, from which each computes another part; gathered once for all who read the tensor."""
    if own is not divided.own:
        return gathered(in_dtype(own, dtype), dim, elements)
    kept: dict[Any, Tensor] = divided.gathers
    key = dim, torch.is_grad_enabled(), dtype, state_of(own)
    if key not in kept:
        kept[key] = gathered(in_dtype(own, dtype), dim, elements)
    return kept[key]


def in_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor as a product under autocast would take it, before it travels rather than after: half the bytes."""
    return tensor if dtype is None or tensor.dtype != torch.float32 else tensor.to(dtype)


def learns(tensor: Tensor) -> bool:
    """Whether gradients will flow to it."""
    return tensor.requires_grad and torch.is_grad_enabled()


def met(tensor: Tensor, ranks: Ranks, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor that all ranks have alike, as each uses it for its own elements: it enters, and its gradient is summed.

    Maps that read the same tensor one after the other, as those of queries, keys and values do, share one entrance, and
    so one sum in backward.
    """
    if not learns(tensor):
        return tensor
    if torch.compiler.is_dynamo_compiling():
        in_graph = ranks.last_in_graph
        if in_graph is None or in_graph[0] is not tensor or in_graph[1] != dtype:
            in_graph = ranks.last_in_graph = tensor, dtype, entered(in_dtype(tensor, dtype), ranks)
        return in_graph[2]
    is_mean = becomes_mean(tensor, ranks)
    last: Any = ranks.last_entered
    when = version(tensor), dtype, checkpoint_around()
    if last is not None and last[0]() is tensor and last[1] == when:
        again: Tensor = last[2]
        return again
    made = in_dtype(averaged_later(tensor, ranks), dtype) if is_mean else entered(in_dtype(tensor, dtype), ranks)
    ranks.last_entered = weakref.ref(tensor, ranks.forget), when, made
    return made


def as_divided(own: Tensor, cuts: Cuts | None) -> Tensor:
    """A result of which ranks have these elements; without cuts the plain tensor, which all have alike."""
    return Divided(own, cuts) if cuts else own


def summed_up(summand: Tensor, ranks: Ranks, cuts: Cuts) -> Tensor:
    """The sum of what ranks computed, of which each keeps its part of the sequence if these ranks split it.

    Args:
        summand: what this rank computed.
        ranks: over which is summed.
        cuts: of the summand's dimensions that are divided already.

    Returns:
        The whole sum where it is no hidden state (batch, sequence, features), or has fewer positions than ranks.
    """
    dim = ranks.sequence_dim
    if dim is None or summand.dim() != 3 or dim in cuts or summand.shape[dim] < ranks.count:
        return as_divided(total(summand, ranks), cuts)
    elements = ranks.chunks(summand.shape[dim])
    return Divided(total_part(summand, dim, elements), {**cuts, dim: elements})
