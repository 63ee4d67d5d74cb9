"""Attention over a divided sequence against whole attention: values, gradients, bytes, memory, balance."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.collectives.conjugate_collectives import all_gather_elements
from lightning_parallel.collectives.elements import Elements, Ranks
from lightning_parallel.techniques.context_parallel.attention import ContextAttention
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import ranks


def zigzag(group: Ranks, size: int) -> Elements:
    return group.zigzag(size)


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
    """A bias of every head, within a causal order of minus huge numbers; a row has nothing else."""
    torch.manual_seed(3)
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    later[size // 2] = True
    return torch.randn(1, 4, size, size, dtype=torch.float64).masked_fill(later, torch.finfo(torch.float64).min)


MASKS = {
    "causal": None,
    "full": None,
    "window": window,
    "padding": padding,
    "left padding": left_padding,
    "documents": documents,
    "additive": additive,
}
METHODS = ("ring", "ulysses", "all_gather", "auto", "hybrid")
PLACES = {"zigzag": zigzag, "contiguous": Ranks.chunks, "striped": striped}
WIDTH = 8


def whole_attention(
    shapes: list[tuple[int, ...]], mask: Tensor | None, is_causal: bool, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Queries, keys and values with gradients, the output and its gradient."""
    torch.manual_seed(7)
    given = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]
    grouped = len(shapes[0]) > 2 and shapes[0][-3] != shapes[1][-3]
    out = F.scaled_dot_product_attention(*given, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    return given, out.detach(), gradient


def divided_attention(
    given: list[Tensor], elements: Elements, mask: Any, is_causal: bool, gradient: Tensor, **kwargs: Any
) -> tuple[Tensor, list[Tensor]]:
    """This rank's rows of the output, and the gradients of its queries, keys and values."""
    dim = gradient.dim() - 2
    own = [elements.take(each.detach(), dim).contiguous().requires_grad_() for each in given]
    grouped = given[0].shape[-3] != given[1].shape[-3]
    divided = [Divided(each, {dim: elements}) for each in own]
    out = F.scaled_dot_product_attention(*divided, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped, **kwargs)
    assert isinstance(out, Divided)
    assert out.shape == gradient.shape
    out.own.backward(elements.take(gradient, dim))
    return out.own.detach(), [each.grad for each in own]


def same(
    method: str, shapes: list[tuple[int, ...]], mask: Tensor | None, is_causal: bool, place: Any = zigzag, **kwargs: Any
) -> None:
    """Compares values and gradients with those of whole tensors."""
    given, out, gradient = whole_attention(shapes, mask, is_causal, **kwargs)
    elements = place(group_of(method), shapes[0][-2])
    found, gradients = divided_attention(given, elements, mask, is_causal, gradient)
    tolerance = 1e-10 if out.dtype == torch.float64 else 1e-5
    dim = out.dim() - 2
    wholes = [out, *(each.grad for each in given)]
    for name, whole, mine in zip(("out", "query", "key", "value"), wholes, [found, *gradients], strict=True):
        torch.testing.assert_close(
            mine, elements.take(whole, dim), rtol=tolerance, atol=tolerance,
            msg=lambda text, name=name: f"{name}, {method}, {shapes}: {text}",
        )  # fmt: skip


def group_of(method: str) -> Ranks:
    group = Ranks(dist.group.WORLD, "sequence")
    group.attention = ContextAttention(method, 2 if method == "hybrid" else None)
    return group


def shapes_of(size: int, heads: int, key_heads: int) -> list[tuple[int, ...]]:
    return [(2, heads, size, WIDTH), (2, key_heads, size, WIDTH), (2, key_heads, size, WIDTH)]


@ranks(4)
def test_attention_is_that_of_one_device() -> None:
    for number, (kind, method, size) in enumerate(itertools.product(MASKS, METHODS, (29, 3))):
        mask, place = MASKS[kind] and MASKS[kind](size), [*PLACES.values()][number % 3]
        same(method, shapes_of(size, 4, 2 if number % 2 else 4), mask, kind == "causal", place)


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", PLACES)
@ranks(4)
def test_every_mask_and_method_wherever_positions_are(place: str) -> None:
    heads = ((4, 4), (4, 2), (4, 1), (8, 4))
    for kind, method, size, counts in itertools.product(MASKS, METHODS, (32, 29, 3, 80), heads):
        if counts[0] == 4 or MASKS[kind] is not additive:
            same(method, shapes_of(size, *counts), MASKS[kind] and MASKS[kind](size), kind == "causal", PLACES[place])


@ranks(2)
def test_attention_in_single_precision_and_by_the_plain_kernel() -> None:
    """Long enough for several tiles of the fused kernel, some of which are masked as a whole."""
    size = 1500
    assert torch._fused_sdp_choice(*[torch.randn(1, 2, size, 16)] * 3) == 1
    for method, kind in (("ring", "causal"), ("all_gather", "window"), ("ring", "documents")):
        shapes = [(1, heads, size, 16) for heads in (4, 2, 2)]
        same(method, shapes, MASKS[kind] and MASKS[kind](size), kind == "causal", dtype=torch.float32)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for kind in ("causal", "left padding", "additive"):
            same("ring", shapes_of(29, 4, 2), MASKS[kind] and MASKS[kind](29), kind == "causal")


FORMS = [
    [(6, 20, 8)] * 3,  # no heads
    [(2, 3, 4, 20, 8)] * 3,
    [(2, 4, 20, 8), (2, 2, 20, 8), (2, 2, 20, 6)],
    [(2, 4, 20, 7)] * 3,
]


@ranks(2)
def test_any_shape_of_heads() -> None:
    torch.manual_seed(1)
    for shapes in FORMS:
        masks = [None, window(20)[0, 0], torch.randn((*shapes[0][:-2], 20, 20)).double(), torch.rand(1, 1, 20) > 0.3]
        for method, mask in itertools.product(METHODS[:3], masks):
            same(method, shapes, mask, is_causal=False)
            same(method, shapes, None, is_causal=True)


@ranks(2)
def test_mask_that_learns_or_is_divided() -> None:
    """As one that a model makes of numbers of documents in its batch."""
    for method, shape in itertools.product(METHODS[:3], [(1, 4, 20, 20), (20, 20), (2, 1, 1, 20)]):
        whole = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        given, out, gradient = whole_attention(shapes_of(20, 4, 2), whole, is_causal=False)
        mask, elements = whole.detach().clone().requires_grad_(), zigzag(group_of(method), 20)
        found, gradients = divided_attention(given, elements, mask, False, gradient)
        torch.testing.assert_close(found, elements.take(out, 2))
        torch.testing.assert_close(gradients[1], elements.take(given[1].grad, 2))
        torch.testing.assert_close(mask.grad, whole.grad)
    whole = documents(29)
    given, out, gradient = whole_attention(shapes_of(29, 4, 2), whole, is_causal=False)
    for method, dim in itertools.product(METHODS[:3], (2, 3)):
        elements = zigzag(group_of(method), 29)
        divided = Divided(elements.take(whole, dim), {dim: elements})
        found, gradients = divided_attention(given, elements, divided, False, gradient)
        torch.testing.assert_close(found, elements.take(out, 2))
        torch.testing.assert_close(gradients[2], elements.take(given[2].grad, 2))


def on_a_grid() -> tuple[Ranks, Ranks]:
    """Two ranks divide the sequence, two the heads, as tensor parallel does."""
    groups = [[dist.new_group(members) for members in table] for table in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
    rank = dist.get_rank()
    return Ranks(groups[0][rank // 2], "sequence"), Ranks(groups[1][rank % 2], "heads")


HEADS = [
    (4, 2, [[(0, 2)], [(2, 4)]], [[(0, 1)], [(1, 2)]]),
    (3, 3, [[(0, 2)], [(2, 3)]], [[(0, 2)], [(2, 3)]]),
    (2, 1, [[(0, 2)], []], [[(0, 1)], []]),  # none on one rank
]


@ranks(4)
def test_heads_may_be_divided_by_other_ranks() -> None:
    along, others = on_a_grid()
    cases = itertools.product(HEADS, ("ring", "all_gather", "auto"), ("causal", "window", "additive"))
    for (heads, key_heads, of_queries, of_keys), method, order in cases:
        if order == "additive" and heads != 4:
            continue
        mask = MASKS[order] and MASKS[order](20)
        along.attention = ContextAttention(method)
        given, out, gradient = whole_attention(shapes_of(20, heads, key_heads), mask, order == "causal")
        places = [others.elements(heads, of_queries), *[others.elements(key_heads, of_keys)] * 2]
        cuts = [{1: place, 2: along.zigzag(20)} for place in places]
        own = [taken(each.detach(), cut).requires_grad_() for each, cut in zip(given, cuts, strict=True)]
        divided = [Divided(each, cut) for each, cut in zip(own, cuts, strict=True)]
        found: Any = F.scaled_dot_product_attention(
            *divided, attn_mask=mask, is_causal=order == "causal", enable_gqa=heads != key_heads
        )
        assert not along.gathered
        found.own.backward(taken(gradient, cuts[0]))
        torch.testing.assert_close(found.own, taken(out, cuts[0]))
        for each, mine, cut in zip(given, own, cuts, strict=True):
            summed = all_gather_elements(mine.grad, 1, cut[1])
            torch.testing.assert_close(summed, cut[2].take(each.grad, 2))


def taken(whole: Tensor, cuts: Any) -> Tensor:
    for dim, elements in cuts.items():
        whole = elements.take(whole, dim)
    return whole.clone()


@ranks(2)
def test_inference_recomputation_and_autocast() -> None:
    for method, kind in itertools.product(METHODS[:3], ("causal", "window")):
        mask, elements = MASKS[kind] and MASKS[kind](20), zigzag(group_of(method), 20)
        given, out, gradient = whole_attention(shapes_of(20, 4, 2), mask, kind == "causal")
        own = [elements.take(each.detach(), 2).requires_grad_() for each in given]

        def attend(*own: Tensor, mask: Any = mask, elements: Any = elements, kind: str = kind) -> Tensor:
            divided = [Divided(each, {2: elements}) for each in own]
            return F.scaled_dot_product_attention(
                *divided, attn_mask=mask, is_causal=kind == "causal", enable_gqa=True
            ).own

        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(attend(*own), elements.take(out, 2))
        torch.utils.checkpoint.checkpoint(attend, *own, use_reentrant=False).backward(elements.take(gradient, 2))
        torch.testing.assert_close(own[1].grad, elements.take(given[1].grad, 2))
        with torch.autocast("cpu", torch.bfloat16):
            low = attend(*(each.float() for each in own))
        assert low.dtype == torch.bfloat16
        torch.testing.assert_close(low.double(), elements.take(out, 2), rtol=0.05, atol=0.05)


def require_scaled_weights() -> None:
    """Of values that are all one the mean is what dropout leaves of the weights, in the mean one."""
    for method, is_causal in itertools.product(METHODS[:3], (False, True)):
        elements = zigzag(group_of(method), 64)
        given = [Divided(torch.ones(4, 4, elements.length, 8, requires_grad=True), {2: elements}) for _ in range(3)]
        torch.manual_seed(5)
        out = F.scaled_dot_product_attention(*given, dropout_p=0.5, is_causal=is_causal)
        out.own.sum().backward()
        others = [torch.empty_like(out.own) for _ in range(2)]
        dist.all_gather(others, out.own.detach())
        assert not torch.equal(*others), "ranks draw for their own"
        assert abs(torch.stack(others).mean() - 1) < 0.1
        assert out.own.std() > 0.05


@ranks(2)
def test_dropout_scales_and_backward_drops_the_same_weights() -> None:
    """The derivative along some direction is what two nearby values say."""
    require_scaled_weights()
    for method, kind in itertools.product(METHODS[:3], ("causal", "window")):
        elements, mask = zigzag(group_of(method), 24), MASKS[kind] and MASKS[kind](24)
        torch.manual_seed(2 + dist.get_rank())
        own = [
            torch.randn(1, heads, elements.length, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
        ]
        direction = [torch.randn_like(each) for each in own]
        weights = torch.randn_like(own[0])

        def value(given: list[Tensor], mask: Any = mask, elements: Any = elements, weights: Any = weights) -> Tensor:
            torch.manual_seed(9)
            divided = [Divided(each, {2: elements}) for each in given]
            out = F.scaled_dot_product_attention(
                *divided, attn_mask=mask, dropout_p=0.3, is_causal=mask is None, enable_gqa=True
            )
            return (out.own * weights).sum()

        value(own).backward()
        nearby = [[each.detach() + e * d for each, d in zip(own, direction, strict=True)] for e in (1e-5, -1e-5)]
        found = (value(nearby[0]) - value(nearby[1])) / 2e-5
        expected = sum((each.grad * d).sum() for each, d in zip(own, direction, strict=True))
        both = torch.stack([found, expected])
        dist.all_reduce(both)
        torch.testing.assert_close(both[0], both[1], rtol=1e-6, atol=1e-6)


@ranks(4)
def test_what_attention_cannot_do_is_refused_on_all_ranks() -> None:
    elements = zigzag(group_of("ring"), 20)
    own = [torch.randn(1, 2, elements.length, 8, requires_grad=True) for _ in range(3)]
    out = F.scaled_dot_product_attention(*(Divided(each, {2: elements}) for each in own), is_causal=True)
    with pytest.raises(RuntimeError, match="method='ulysses'"):
        torch.autograd.grad(out.own.sum(), own, create_graph=True)
    for method, heads, message in (
        ("ulysses", (6, 6), "attention has 6 query heads and 6 key/value heads; use 1, 2, 3 or 6 ranks"),
        ("ulysses", (12, 3), "use 1, 3, 6 or 12 ranks, or method='ring'"),
        ("hybrid", (3, 3), "divides heads over 2 ranks, .* give ulysses_size=1 or 3, or method='ring'"),
    ):
        elements = zigzag(group_of(method), 8)
        given = [Divided(torch.ones(1, count, elements.length, 8), {2: elements}) for count in (*heads, heads[1])]
        with pytest.raises(ValueError, match=message):
            F.scaled_dot_product_attention(*given, enable_gqa=heads[0] != heads[1])
