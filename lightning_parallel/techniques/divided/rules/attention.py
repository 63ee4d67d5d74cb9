"""Attention of a rank's own heads, or of its own positions by who divides the sequence."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.collectives.made_of import Made
from lightning_parallel.techniques.divided.meeting import as_divided, as_they_are, brought_together, learns, own_part
from lightning_parallel.techniques.divided.randomness import drawn_apart, places_of
from lightning_parallel.techniques.divided.table import Cuts, LocalCall, rule, same_cuts
from lightning_parallel.techniques.divided.tensor import Divided, is_divided

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@rule(F.scaled_dot_product_attention, remembered=True)
def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    given = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    query, key, value = (given.pop(name) for name in NAMES[:3])
    mask, drops = given.pop("attn_mask", None), given.get("dropout_p", 0.0)
    if query.dim() != key.dim() or query.dim() != value.dim() or query.dim() < 3:
        return NotImplemented
    if mask is not None and not isinstance(mask, Divided) and type(mask) not in (Tensor, nn.Parameter):
        return NotImplemented  # such as torch.nn.attention.bias, which has values only where it attends
    along = _along_the_sequence(query, key, value, mask, given)
    if along is not NotImplemented:
        return along
    grouped = bool(given.get("enable_gqa"))
    if grouped and query.shape[-3] != key.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = (torch.repeat_interleave(each, times, -3) for each in (key, value))
        given["enable_gqa"] = False
    # The query is the last of what meets, and so stays as it is; dimensions without a name are broadcast.
    leads = [each.shape[:-2] for each in (query, key, value)]
    wide = list(map(max, *leads))
    of_leads = [[k if size == wide[k] else None for k, size in enumerate(lead)] for lead in leads]
    ends = (["query", "in"], ["key", "in"], ["key", "out"])
    tensors: list[Tensor] = [value, key, query]
    names: list[list[Any]] = [[*lead, *end] for lead, end in zip(of_leads, ends, strict=True)][::-1]
    if mask is not None:
        over = [*range(query.dim() - 2), "query", "key"][query.dim() - mask.dim() :]
        tensors.insert(0, mask)
        names.insert(0, [name if size != 1 else None for name, size in zip(over, mask.shape, strict=True)])
    usual = None if drops or grouped else as_they_are(tensors, names)
    mine = brought_together(tensors, names) if usual is None else ([], usual)
    of_result = [*range(query.dim() - 2), "query", "out"]
    if mine is None or set(mine[1]) - {*of_result} or ("query" in mine[1] and given.get("is_causal")):
        return NotImplemented
    cuts = {of_result.index(name): elements for name, elements in mine[1].items()}
    if usual is not None:
        none = any(0 in elements.lengths for elements in cuts.values())
        return LocalCall(_attended if none else func, cuts)
    with drawn_apart(query.device, places_of(cuts)) if drops else nullcontext():
        return as_divided(_attended(*mine[0][::-1], **given), cuts)


def _attended(*args: Any, **kwargs: Any) -> Tensor:
    """Attention where a rank may have no heads, of which torch makes another shape and gives a mask no gradient."""
    given = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    tensors: list[Tensor] = [given[name] for name in NAMES[:4] if isinstance(given.get(name), Tensor)]
    if all(map(Tensor.numel, tensors)):
        return F.scaled_dot_product_attention(*args, **kwargs)
    query, key, value, *_ = tensors
    lead = cast(Any, torch.broadcast_shapes)(*[each.shape[:-2] for each in (query, key, value)])
    zero: Tensor = sum([each.sum() * 0 for each in tensors if each.is_floating_point()])  # type: ignore[assignment]
    return value.new_zeros(*lead, query.shape[-2], value.shape[-1]) + zero


# ---------------------------------------------------------------- a divided sequence


def _along_the_sequence(query: Any, key: Any, value: Any, mask: Tensor | None, given: dict[str, Any]) -> Any:
    """Attention of this rank's queries to the keys and values of all, by whom their ranks have for that."""
    dim = query.dim() - 2
    if not all(map(is_divided, (query, key, value))) or dim not in query.cuts:
        return NotImplemented
    if query.cuts[dim].ranks.attention is None:
        return NotImplemented
    if torch.compiler.is_dynamo_compiling():
        # The whole is exact, but no use: the graph ends where messages along the sequence would be sent in it.
        torch._dynamo.graph_break(msg="attention over a divided sequence sends messages, which no graph has")
        return NotImplemented
    cuts = _cuts_of_all(query, key, value, bool(given.get("enable_gqa")))
    if cuts is None:
        return NotImplemented
    causal = bool(given.get("is_causal"))
    if mask is not None and (causal or mask.dim() > query.dim() or mask.dim() < 2):
        return NotImplemented  # torch says what is wrong
    elements, drops = cuts[dim], given.get("dropout_p", 0.0)
    attention = elements.ranks.attention
    assert attention is not None

    made, rows = Made(), None
    if mask is not None:
        if not learns(mask):
            of_masks = elements.ranks.made_of
            made = of_masks.wrapper(mask, mask.own) if is_divided(mask) else of_masks.plain(mask)
        # This rank's part of the mask with all columns, once for all layers.
        name = "own rows", query.dim(), tuple((k, each.runs) for k, each in cuts.items())
        names: list[Any] = [k if n != 1 else None for k, n in enumerate(mask.shape, query.dim() - mask.dim())]
        rows = made.get(name, own_part, mask, [*names[:-1], "key"], cuts)
    with drawn_apart(query.device, places_of(cuts)) if drops else nullcontext():
        own = attention(
            query.own, key.own, value.own, elements, mask=rows, made=made, is_causal=causal,
            has_rows=mask is not None and mask.shape[-2] != 1, scale=given.get("scale"), dropout=drops,
        )  # fmt: skip
    return own if own is NotImplemented else as_divided(own, cuts)


def _cuts_of_all(query: Divided, key: Divided, value: Divided, grouped: bool) -> Cuts | None:
    """The cuts of queries where keys and values are divided alike, the sequence by ranks that know what to do."""
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
    # on each rank, each head of keys is that of as many heads of queries, which follow each other
    in_groups = queries is keys if queries is None or keys is None else queries.same(keys.grown(times))
    return query.cuts if in_groups and same_cuts(of_queries, of_keys) else None
