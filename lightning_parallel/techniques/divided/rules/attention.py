"""Rule of attention: on local heads, or on local positions by the technique that shards the sequence."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.collectives.derived_cache import DerivedValues
from lightning_parallel.collectives.elements import Elements
from lightning_parallel.techniques.divided.alignment import (
    align_shardings,
    aligned_local,
    as_divided,
    needs_grad,
    shared_sharding,
)
from lightning_parallel.techniques.divided.randomness import indices_key, rng_for_elements
from lightning_parallel.techniques.divided.table import Cuts, LocalCall, rule, same_cuts
from lightning_parallel.techniques.divided.tensor import Divided, is_divided

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@rule(F.scaled_dot_product_attention, remembered=True)
def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    named = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    query, key, value = (named.pop(name) for name in NAMES[:3])
    mask, drops = named.pop("attn_mask", None), named.get("dropout_p", 0.0)
    if query.dim() != key.dim() or query.dim() != value.dim() or query.dim() < 3:
        return NotImplemented
    if mask is not None and not isinstance(mask, Divided) and type(mask) not in (Tensor, nn.Parameter):
        return NotImplemented  # e.g. torch.nn.attention.bias, which has values only where it attends
    over_sequence = _along_the_sequence(query, key, value, mask, named)
    if over_sequence is not NotImplemented:
        return over_sequence
    grouped = bool(named.get("enable_gqa"))
    if grouped and query.shape[-3] != key.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = (torch.repeat_interleave(each, times, -3) for each in (key, value))
        named["enable_gqa"] = False
    # The query comes last, and so keeps its sharding; dimensions without a name are broadcast.
    batch_shapes = [each.shape[:-2] for each in (query, key, value)]
    batch_shape = list(map(max, *batch_shapes))
    batch_names = [[k if size == batch_shape[k] else None for k, size in enumerate(lead)] for lead in batch_shapes]
    ends = (["query", "in"], ["key", "in"], ["key", "out"])
    tensors: list[Tensor] = [value, key, query]
    names: list[list[Any]] = [[*batch_dims, *end] for batch_dims, end in zip(batch_names, ends, strict=True)][::-1]
    if mask is not None:
        mask_names = [*range(query.dim() - 2), "query", "key"][query.dim() - mask.dim() :]
        tensors.insert(0, mask)
        names.insert(0, [name if size != 1 else None for name, size in zip(mask_names, mask.shape, strict=True)])
    aligned_cuts = None if drops or grouped else shared_sharding(tensors, names)
    aligned = align_shardings(tensors, names) if aligned_cuts is None else ([], aligned_cuts)
    of_result = [*range(query.dim() - 2), "query", "out"]
    if aligned is None or set(aligned[1]) - {*of_result} or ("query" in aligned[1] and named.get("is_causal")):
        return NotImplemented
    cuts = {of_result.index(name): elements for name, elements in aligned[1].items()}
    if aligned_cuts is not None:
        has_no_elements = any(0 in elements.lengths for elements in cuts.values())
        return LocalCall(_attended if has_no_elements else func, cuts)
    with rng_for_elements(query.device, indices_key(cuts)) if drops else nullcontext():
        return as_divided(_attended(*aligned[0][::-1], **named), cuts)


def _attended(*args: Any, **kwargs: Any) -> Tensor:
    """Attention where a rank may have no heads: torch's result has another shape then, and a mask gets no gradient."""
    named = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    tensors: list[Tensor] = [named[name] for name in NAMES[:4] if isinstance(named.get(name), Tensor)]
    if all(map(Tensor.numel, tensors)):
        return F.scaled_dot_product_attention(*args, **kwargs)
    query, key, value, *_ = tensors
    lead = cast(Any, torch.broadcast_shapes)(*[each.shape[:-2] for each in (query, key, value)])
    zero: Tensor = sum([each.sum() * 0 for each in tensors if each.is_floating_point()])  # type: ignore[assignment]
    return value.new_zeros(*lead, query.shape[-2], value.shape[-1]) + zero


# ---------------------------------------------------------------- a sharded sequence


class Inputs(NamedTuple):
    """Arguments of `Ranks.attention`, which returns this rank's rows of attention, or NotImplemented.

    Tensors are local shards: t is the number of positions of this rank, T that of all ranks.
    """

    query: Tensor  # [..., H, t, D]
    key: Tensor  # [..., Hkv, t, D]; Hkv divides H
    value: Tensor  # [..., Hkv, t, Dv]
    elements: Elements  # positions of each rank
    mask: Tensor | None  # booleans, or biases of scores: this rank's rows with all columns; broadcast as in torch
    made: DerivedValues  # cache of what layers derive from the mask
    has_rows: bool  # whether the mask differs between queries, which a rank with one query cannot see
    is_causal: bool  # whether queries attend to their own and earlier positions only
    scale: float | None  # of scores; None for 1 / sqrt(D)
    dropout: float  # probability with which weights are dropped


def _along_the_sequence(query: Any, key: Any, value: Any, mask: Tensor | None, given: dict[str, Any]) -> Any:
    """Compute attention of this rank's queries to the keys and values of all ranks, by `Ranks.attention`."""
    dim = query.dim() - 2
    if not all(map(is_divided, (query, key, value))) or dim not in query.cuts:
        return NotImplemented
    if query.cuts[dim].ranks.attention is None:
        return NotImplemented
    if torch.compiler.is_dynamo_compiling():
        # The fallback to full tensors is exact, but useless: messages along the sequence would end the graph in it.
        torch._dynamo.graph_break(msg="attention over a divided sequence communicates, which graphs cannot")
        return NotImplemented
    cuts = _cuts_of_all(query, key, value, bool(given.get("enable_gqa")))
    if cuts is None:
        return NotImplemented
    causal = bool(given.get("is_causal"))
    if mask is not None and (causal or mask.dim() > query.dim() or mask.dim() < 2):
        return NotImplemented  # torch raises the error
    elements, drops = cuts[dim], given.get("dropout_p", 0.0)
    attention = elements.ranks.attention
    assert attention is not None

    derived, rows = DerivedValues(), None
    if mask is not None:
        if not needs_grad(mask):
            of_masks = elements.ranks.derivations
            derived = of_masks.wrapper(mask, mask.own) if is_divided(mask) else of_masks.plain(mask)
        # This rank's rows of the mask with all columns, computed once for all layers.
        name = "own rows", query.dim(), tuple((k, each.runs) for k, each in cuts.items())
        names: list[Any] = [k if n != 1 else None for k, n in enumerate(mask.shape, query.dim() - mask.dim())]
        rows = derived.get(name, aligned_local, mask, [*names[:-1], "key"], cuts)
    with rng_for_elements(query.device, indices_key(cuts)) if drops else nullcontext():
        has_rows = mask is not None and mask.shape[-2] != 1
        own = attention(
            Inputs(query.own, key.own, value.own, elements, rows, derived, has_rows, causal, given.get("scale"), drops)
        )
    return own if own is NotImplemented else as_divided(own, cuts)


def _cuts_of_all(query: Divided, key: Divided, value: Divided, grouped: bool) -> Cuts | None:
    """Return the cuts of the queries if keys and values are sharded the same way, else None."""
    dim, heads = query.dim() - 2, query.dim() - 3
    if (
        not same_cuts(key.cuts, value.cuts)
        or query.shape[:heads] != key.shape[:heads]
        or key.shape[:dim] != value.shape[:dim]
    ):
        return None
    times = query.shape[heads] // key.shape[heads] if grouped else 1
    if query.shape[heads] != key.shape[heads] * times or query.shape[-1] != key.shape[-1]:
        return None
    of_queries, of_keys = ({k: each for k, each in cuts.items() if k != heads} for cuts in (query.cuts, key.cuts))
    queries, keys = query.cuts.get(heads), key.cuts.get(heads)
    # on each rank, each key head must be the one of `times` consecutive query heads
    in_groups = queries is keys if queries is None or keys is None else queries.same(keys.grown(times))
    return query.cuts if in_groups and same_cuts(of_queries, of_keys) else None
