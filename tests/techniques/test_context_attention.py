"""Attention over a divided sequence against whole attention: values, gradients, bytes, memory, balance."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.collectives.elements import Elements, Ranks
from lightning_parallel.techniques.context_parallel.attention import ContextAttention
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import ranks
from tests.tiers import covering


def zigzag(group: Ranks, size: int) -> Elements:
    return group.zigzag(size)


def contiguous(group: Ranks, size: int) -> Elements:
    return group.chunks(size)


def striped(group: Ranks, size: int) -> Elements:
    return group.elements(size, [[(n, n + 1) for n in range(r, size, group.count)] for r in range(group.count)])


def window(size: int) -> Tensor:
    positions = torch.arange(size)
    distance = positions[:, None] - positions
    return ((distance >= 0) & (distance < 5))[None, None]


def padding(size: int) -> Tensor:
    """Two samples, the second of which ends earlier; keys alone are masked."""
    lengths = torch.tensor([size, max(1, size - 3)])
    return (torch.arange(size) < lengths[:, None])[:, None, None]


def left_padding(size: int) -> Tensor:
    """Rows of the second sample before its first position meet nothing."""
    seen = (torch.arange(size) >= torch.tensor([0, size // 3])[:, None])[:, None, None]
    return seen & torch.ones(size, size, dtype=torch.bool).tril()


def documents(size: int) -> Tensor:
    ids = torch.arange(size) * 3 // size
    return ((ids[:, None] == ids) & torch.ones(size, size, dtype=torch.bool).tril())[None, None]


def additive(size: int) -> Tensor:
    """A bias of every head, within a causal order of minus huge numbers."""
    torch.manual_seed(3)
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    return torch.randn(1, 4, size, size, dtype=torch.float64).masked_fill(later, torch.finfo(torch.float64).min)


def drowned(size: int) -> Tensor:
    """Some rows have nothing but minus huge numbers."""
    mask = additive(size)[:, :1].clone()
    mask[:, :, size // 2] = torch.finfo(torch.float64).min
    return mask


MASKS = {
    "causal": None,
    "full": None,
    "window": window,
    "padding": padding,
    "left padding": left_padding,
    "documents": documents,
    "additive": additive,
    "drowned": drowned,
}
METHODS = ["ring", "ulysses", "all_gather", "auto"]
SIZES = [32, 29, 3]
WIDTH = 8


def whole_attention(
    size: int,
    heads: int,
    key_heads: int,
    mask: Tensor | None,
    is_causal: bool,
    dtype: torch.dtype = torch.float64,
    width: int = WIDTH,
    value_width: int = WIDTH,
) -> tuple[list[Tensor], Tensor, Tensor]:
    torch.manual_seed(7)
    shapes = [(2, heads, size, width), (2, key_heads, size, width), (2, key_heads, size, value_width)]
    given = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]
    out = F.scaled_dot_product_attention(*given, attn_mask=mask, is_causal=is_causal, enable_gqa=heads != key_heads)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    return given, out.detach(), gradient


def divided_attention(
    given: list[Tensor], elements: Elements, mask: Any, is_causal: bool, gradient: Tensor, **kwargs: Any
) -> tuple[Tensor, list[Tensor]]:
    """This rank's rows of the output, and the gradients of its queries, keys and values."""
    own = [elements.take(each.detach(), 2).contiguous().requires_grad_() for each in given]
    grouped = given[0].shape[1] != given[1].shape[1]
    out = F.scaled_dot_product_attention(
        *(Divided(each, {2: elements}) for each in own),
        attn_mask=mask,
        is_causal=is_causal,
        enable_gqa=grouped,
        **kwargs,
    )
    assert isinstance(out, Divided)
    assert out.shape == gradient.shape
    out.own.backward(elements.take(gradient, 2))
    return out.own.detach(), [each.grad for each in own]


def check(method: str, kind: str, size: int, heads: int, key_heads: int, place: Any = zigzag, **kwargs: Any) -> None:
    mask = MASKS[kind] and MASKS[kind](size)
    given, out, gradient = whole_attention(size, heads, key_heads, mask, kind == "causal", **kwargs)
    group = Ranks(dist.group.WORLD, "sequence")
    group.attention = ContextAttention(method)
    elements = place(group, size)
    found, gradients = divided_attention(given, elements, mask, kind == "causal", gradient)
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if out.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found, elements.take(out, 2), **tolerance)
    for each, mine in zip(given, gradients, strict=True):
        torch.testing.assert_close(mine, elements.take(each.grad, 2), **tolerance)


@covering(kind=list(MASKS), method=METHODS, size=SIZES, heads=[(4, 4), (4, 2)])
@ranks(2)
def test_two_ranks_attend_as_one_device_does(kind: str, method: str, size: int, heads: tuple[int, int]) -> None:
    check(method, kind, size, *heads)


@covering(kind=list(MASKS), method=[*METHODS, "hybrid"], size=SIZES, heads=[(4, 4), (8, 2)])
@ranks(4)
def test_four_ranks_attend_as_one_device_does(kind: str, method: str, size: int, heads: tuple[int, int]) -> None:
    if MASKS[kind] in (additive,) and heads[0] != 4:
        heads = (4, 1)
    check(method, kind, size, *heads)
