"""Attention to keys and values that were gathered: each rank has all of them while it computes, and keeps its own.

Backward gathers them again, and sums their gradients with a reduce_scatter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from lightning_parallel.collectives.by_elements import gathered, part_of_sum, whole_of
from lightning_parallel.collectives.elements import Elements
from lightning_parallel.techniques.context_parallel.attention.blocks import Block
from lightning_parallel.techniques.context_parallel.attention.merged import Merged, Terms, backward_of, keep

SEQUENCE = 2


def all_gather(key: Tensor, value: Tensor, elements: Elements, block: Block, terms: Terms) -> Tensor:
    """This rank's rows of attention.

    Args:
        key: (B, Hkv, own, D).
        value: (B, Hkv, own, Dv).
        elements: the positions that each rank has.
        block: this rank's queries and all keys.
        terms: this rank's queries, and how they attend.
    """
    function: Any = _AllGather
    query, mask, *numbers = terms
    out: Tensor = function.apply(query, key, value, mask, elements, block, *numbers)
    return out


def all_gather_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    elements: Elements,
    mask: Tensor | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """The same by torch's own attention, for masks that learn."""
    key, value = (gathered(each, SEQUENCE, elements) for each in (key, value))
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale, enable_gqa=grouped)


class _AllGather(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        elements: Elements,
        block: Block,
        *numbers: Any,
    ) -> Tensor:
        merged = Merged(Terms(query, mask, *numbers), value.shape[-1])
        merged.add(block, *_wholes(key, value, elements))
        ctx.elements, ctx.block = elements, block
        return keep(ctx, merged, key, value, numbers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        backward, key, value = backward_of(ctx, gradient)
        summands = backward.add(ctx.block, *_wholes(key, value, ctx.elements))
        of_both = part_of_sum(torch.cat(summands, -1).to(key.dtype), SEQUENCE, ctx.elements)
        of_key, of_value = torch.split(of_both, [key.shape[-1], value.shape[-1]], -1)
        return backward.of_query.to(backward.terms.query.dtype), of_key, of_value, *[None] * (3 + len(ctx.numbers))


def _wholes(key: Tensor, value: Tensor, elements: Elements) -> tuple[Tensor, Tensor]:
    """All keys and values, by one collective."""
    both = whole_of(torch.cat([key, value], -1), SEQUENCE, elements)
    keys, values = torch.split(both, [key.shape[-1], value.shape[-1]], -1)
    return keys.contiguous(), values.contiguous()
