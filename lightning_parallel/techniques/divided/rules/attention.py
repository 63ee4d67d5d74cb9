"""Attention of a rank's own heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.techniques.divided.meeting import as_divided, brought_together
from lightning_parallel.techniques.divided.randomness import drawn_apart
from lightning_parallel.techniques.divided.tensor import rule

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@rule(F.scaled_dot_product_attention)
def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    given = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    query, key, value = (given.pop(name) for name in NAMES[:3])
    mask, drops = given.pop("attn_mask", None), given.get("dropout_p", 0.0)
    if query.dim() != key.dim() or query.dim() != value.dim() or query.dim() < 3:
        return NotImplemented
    lead: list[Any] = list(range(query.dim() - 2))
    if given.get("enable_gqa") and query.shape[-3] != key.shape[-3]:
        query, key, value = _alike_in_heads(query, key, value)
        given["enable_gqa"] = False
    names: list[Any] = [[*lead, "query", "in"], [*lead, "key", "in"], [*lead, "key", "out"]]
    tensors = [query, key, value]
    if mask is not None:
        over = [*lead, "query", "key"][len(lead) + 2 - mask.dim() :]
        tensors.append(mask)
        names.append([name if size != 1 else None for name, size in zip(over, mask.shape, strict=True)])
    mine = brought_together(tensors[::-1], names[::-1])  # the query stays as it is
    if mine is None or set(mine[1]) - {*lead, "query", "out"} or ("query" in mine[1] and given.get("is_causal")):
        return NotImplemented
    own = mine[0][::-1]
    cuts = {[*lead, "query", "out"].index(name): elements for name, elements in mine[1].items()}
    if len(own) > 3:
        given["attn_mask"] = own[3]
    if not drops:
        return as_divided(func(*own[:3], **given), cuts)
    with drawn_apart(own[0].device, cuts.values()):
        return as_divided(func(*own[:3], **given), cuts)


def _alike_in_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with as many heads: those of keys and values are repeated."""
    times = query.shape[-3] // key.shape[-3]
    return query, torch.repeat_interleave(key, times, -3), torch.repeat_interleave(value, times, -3)
