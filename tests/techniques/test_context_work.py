"""What attention over a divided sequence costs: bytes, memory, scores, and which method is taken for that."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.collectives import functional
from lightning_parallel.collectives.circle import Circle
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.context_parallel.attention import ContextAttention
from lightning_parallel.techniques.context_parallel.attention import merged as merging
from lightning_parallel.techniques.context_parallel.attention.attention import rounds_of_mask
from lightning_parallel.techniques.context_parallel.attention.blocks import Relation, causal, full
from lightning_parallel.techniques.context_parallel.attention.layout import layout_of
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import run_on_ranks
from tests.techniques.test_context_attention import documents, window

WIDTH, BYTES = 8, 8
B, H, SIZE = 2, 8, 64


def pretend(rank: int, count: int) -> Ranks:
    """Ranks that only know how many they are."""
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: count)
    return Ranks(group, "sequence")


# -------------------------------------------------------------------- bytes


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of all messages that this rank sends, one by one."""
    sent: list[int] = []
    begin = functional._SendsAndReceives.__init__

    def count(self: Any, messages: Any, received: Any, group: Any) -> None:
        sent.extend(tensor.nbytes for tensor in messages.values())
        begin(self, messages, received, group)

    functional._SendsAndReceives.__init__ = count  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        functional._SendsAndReceives.__init__ = begin  # type: ignore[method-assign]


def attend(
    method: str, key_heads: int, is_causal: bool = False, mask: Tensor | None = None, size: int = SIZE
) -> Divided:
    group = Ranks(dist.group.WORLD, "sequence")
    group.attention = ContextAttention(method)
    elements = group.zigzag(size)
    shapes = [(B, heads, elements.length, WIDTH) for heads in (H, key_heads, key_heads)]
    given = [Divided(torch.randn(shape, dtype=torch.float64, requires_grad=True), {2: elements}) for shape in shapes]
    return F.scaled_dot_product_attention(*given, is_causal=is_causal, enable_gqa=key_heads != H)


def bytes_of_a_layer(method: str, key_heads: int, is_causal: bool) -> tuple[int, int]:
    with counted() as forward:
        out = attend(method, key_heads, is_causal)
    with counted() as backward:
        out.own.sum().backward()
    return sum(forward), sum(backward)


def closed_form(method: str, c: int, h: int, h_kv: int) -> tuple[float, float]:
    """Bytes that a rank sends for a layer, forward and backward."""
    s = SIZE * B * WIDTH * BYTES
    if method == "hybrid":  # teams of two
        inner = closed_form("ulysses", 2, h, h_kv)
        outer = closed_form("ring", c // 2, h // 2, h_kv // 2)
        return inner[0] * 2 / c + outer[0], inner[1] * 2 / c + outer[1]
    if method == "ulysses":
        swapped = (c - 1) / c**2 * s * (2 * h + 2 * max(h_kv, c))
        return swapped, swapped
    return 2 * (c - 1) / c * s * h_kv, 4 * (c - 1) / c * s * h_kv


@pytest.mark.parametrize(
    ("method", "count"), [*itertools.product(("ring", "ulysses", "all_gather"), (2, 4)), ("hybrid", 4)]
)
def test_bytes_are_those_of_the_closed_form(method: str, count: int) -> None:
    for key_heads in (8, 2) if method != "hybrid" else (8, 4):
        for found in run_on_ranks(count, bytes_of_a_layer, method, key_heads, False):
            assert found == closed_form(method, count, H, key_heads)


def test_a_causal_ring_sends_three_quarters() -> None:
    """A rank's later half meets nobody's earlier positions."""
    found = run_on_ranks(4, bytes_of_a_layer, "ring", 2, True)
    forward, backward = (sum(each) / 4 for each in zip(*found, strict=True))
    whole = closed_form("ring", 4, H, 2)
    assert (forward, backward) == (0.75 * whole[0], 0.75 * whole[1])
    assert max(each[0] for each in found) == whole[0]


def bytes_with_documents(count: int) -> tuple[int, int]:
    """The first layer, in which ranks tell each other what they see in the mask, and the second."""
    mask = of_documents(count)
    group = Ranks(dist.group.WORLD, "sequence")
    group.attention = ContextAttention("ring")
    elements, layers = group.zigzag(SIZE), []
    for _ in range(2):
        with counted() as sent:
            given = [Divided(torch.randn(B, H, elements.length, WIDTH), {2: elements}) for _ in range(3)]
            F.scaled_dot_product_attention(*given, attn_mask=mask)
        layers.append(sum(sent))
    return layers[0], layers[1]


def of_documents(count: int) -> Tensor:
    """As many documents as there are chunks."""
    ids = torch.arange(SIZE) * count // SIZE
    return (ids[:, None] == ids) & torch.ones(SIZE, SIZE, dtype=torch.bool).tril()


def test_documents_that_end_with_a_chunk_stay_where_they_are() -> None:
    table = 2 * 7 + 1  # what a rank tells: the relations of its runs, of which rank 3 has one, to all
    for first, second in run_on_ranks(4, bytes_with_documents, 8):
        assert (first, second) == (3 * table, 0)
    half = SIZE // 8 * B * H * WIDTH * 4 * 2
    found = [second for _, second in run_on_ranks(4, bytes_with_documents, 4)]
    # Documents of two chunks, 0-1, 2-3, 4-5, 6-7: the later chunk needs the earlier one. Rank 3 has both 3 and 4.
    assert found == [half, half, half, 2 * half]


def repeated(way: str, key: Any) -> Any:
    """Two heads for eight of queries, as models repeat them."""
    if way == "expand and reshape":
        b, h, t, d = key.shape
        return key[:, :, None].expand(b, h, 4, t, d).reshape(b, 4 * h, t, d)
    if way == "interleave":
        return key.repeat_interleave(4, dim=1)
    return key[:, :1].expand(-1, 8, -1, -1)


def bytes_with_repeats(way: str) -> int:
    group = Ranks(dist.group.WORLD, "sequence")
    group.attention = ContextAttention("ring")
    elements = group.zigzag(SIZE)
    torch.manual_seed(5)
    wholes = [torch.randn(B, heads, SIZE, WIDTH, dtype=torch.float64, requires_grad=True) for heads in (H, 2, 2)]
    out = F.scaled_dot_product_attention(wholes[0], *(repeated(way, each) for each in wholes[1:]))
    out.sum().backward()
    own = [elements.take(each.detach(), 2).requires_grad_() for each in wholes]
    given = [Divided(each, {2: elements}) for each in own]
    with counted() as sent:
        found: Any = F.scaled_dot_product_attention(given[0], *(repeated(way, each) for each in given[1:]))
    torch.testing.assert_close(found.own, elements.take(out, 2))
    found.own.sum().backward()
    for whole, mine in zip(wholes, own, strict=True):
        torch.testing.assert_close(mine.grad, elements.take(whole.grad, 2))
    key = repeated(way, given[1]).clone() if way == "expand" else repeated(way, given[1])
    with torch.no_grad():
        key.mul_(2)  # no longer what it was made of
        changed: Any = F.scaled_dot_product_attention(given[0], key, repeated(way, given[2]))
        whole_key = repeated(way, wholes[1]) * 2
        expected = F.scaled_dot_product_attention(wholes[0], whole_key, repeated(way, wholes[2]))
    torch.testing.assert_close(changed.own, elements.take(expected, 2))
    return sum(sent)


@pytest.mark.parametrize(("way", "heads"), [("expand and reshape", 2), ("interleave", 2), ("expand", 1)])
def test_heads_that_a_model_repeats_travel_once(way: str, heads: int) -> None:
    assert run_on_ranks(2, bytes_with_repeats, way) == [closed_form("ring", 2, H, heads)[0]] * 2


# -------------------------------------------------------------------- memory


@contextmanager
def kept() -> Iterator[dict[int, int]]:
    """The bytes of storages that are kept for backward."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def memory_of_a_layer(method: str, is_causal: bool) -> int:
    with kept() as found:
        attend(method, 4, is_causal, size=512)
    return sum(found.values())


def test_what_is_kept_is_a_ranks_part() -> None:
    given = [torch.randn(B, heads, 512, WIDTH, dtype=torch.float64, requires_grad=True) for heads in (H, 4, 4)]
    with kept() as whole:
        F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
    for method, is_causal in itertools.product(("ring", "ulysses", "all_gather", "hybrid"), (True, False)):
        for found in run_on_ranks(4, memory_of_a_layer, method, is_causal):
            assert found <= 1.03 * sum(whole.values()) / 4


# -------------------------------------------------------------------- scores


@pytest.mark.parametrize("size", [512, 500, 4097])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_ranks_of_a_zigzag_have_equal_work(count: int, size: int) -> None:
    pairs = []
    for rank in range(count):
        rounds = layout_of(pretend(rank, count).zigzag(size), 1).rounds(causal)
        assert all(block.pieces for block in rounds.blocks), "in every step"
        pairs.append(sum(piece.pairs for block in rounds.blocks for piece in block.pieces))
    assert sum(pairs) == size * (size + 1) // 2, "nothing is computed that the order rules out"
    assert max(pairs) * count / sum(pairs) <= 1.10
    contiguous = [
        sum(piece.pairs for block in layout_of(ranks.chunks(size), 1).rounds(causal).blocks for piece in block.pieces)
        for ranks in (pretend(rank, count) for rank in range(count))
    ]
    assert max(contiguous) * count / sum(contiguous) >= 1.4


def test_a_step_takes_few_calls() -> None:
    for rank in range(4):
        rounds = layout_of(pretend(rank, 4).zigzag(64), 1).rounds(causal)
        calls = [[piece.relation.name for piece in block.pieces] for block in rounds.blocks]
        assert calls == [["DIAGONAL", "ALL", "DIAGONAL"] if rank < 3 else ["DIAGONAL"], ["ALL"], ["ALL"], ["ALL"]]
        whole = layout_of(pretend(rank, 4).zigzag(64), 1).rounds(full)
        assert [[piece.relation for piece in block.pieces] for block in whole.blocks] == [[Relation.ALL]] * 4


def relations_of(mask: Tensor) -> list[tuple[str, int]]:
    """What one rank computes: relations and numbers of scores."""
    group = Ranks(dist.group.WORLD, "sequence")
    elements = group.zigzag(mask.shape[-1])
    rounds = rounds_of_mask(elements.take(mask, 2), layout_of(elements, 1), elements)
    assert rounds is not None
    return [(piece.relation.name, piece.pairs) for block in rounds.blocks for piece in block.pieces]


def counted_scores(mask: Tensor) -> tuple[int, set[str]]:
    found = [each for rank in run_on_ranks(4, relations_of, mask) for each in rank]
    return sum(pairs for _, pairs in found), {name for name, _ in found}


def test_what_a_mask_rules_out_is_not_computed() -> None:
    everything = torch.ones(SIZE, SIZE, dtype=torch.bool)
    order = SIZE * (SIZE + 1) // 2
    assert counted_scores(everything.tril()[None, None]) == (order, {"ALL", "DIAGONAL"}), "a causal mask is seen as one"
    assert counted_scores(everything[None, None]) == (SIZE**2, {"ALL"})
    ids = torch.arange(SIZE) * 8 // SIZE
    packed = ((ids[:, None] == ids) & everything.tril())[None, None]
    # Chunks 3 and 4 lie side by side on the last rank: one rectangle, half of which the mask rules out.
    assert counted_scores(packed) == (6 * 8 * 9 // 2 + 16 * 16, {"DIAGONAL", "MASKED"})
    pairs, relations = counted_scores(documents(SIZE))
    assert pairs < 0.8 * order
    assert relations == {"DIAGONAL", "MASKED", "ALL"}
    near = 6 * 8 * 8 + 16 * 16, 4 * 8 * 8 + 2 * 8 * 16  # each chunk meets itself and the one before it
    assert counted_scores(window(SIZE)) == (sum(near), {"MASKED"})


def bytes_and_scores(size: int) -> tuple[int, int]:
    """Of a window over long runs: what the second layer sends, and how many scores there are."""
    positions = torch.arange(size)
    distance = positions[:, None] - positions
    mask = ((distance >= 0) & (distance < 64))[None, None]
    group = Ranks(dist.group.WORLD, "sequence")
    group.attention = ContextAttention("ring")
    elements = group.zigzag(size)
    given = [Divided(torch.randn(1, 1, elements.length, WIDTH), {2: elements}) for _ in range(3)]
    F.scaled_dot_product_attention(*given, attn_mask=mask)
    with counted() as sent:
        F.scaled_dot_product_attention(*given, attn_mask=mask)
    return sum(sent), sum(pairs for _, pairs in relations_of(mask))


def test_of_long_runs_parts_are_left_out() -> None:
    found = run_on_ranks(4, bytes_and_scores, 4096)
    tile = 256  # half a chunk: each meets itself and the one before it
    assert sum(pairs for _, pairs in found) == (16 + 15) * tile**2
    assert sum(sent for sent, _ in found) == 6 * tile * 2 * WIDTH * 4, "across the six borders between ranks"


def order_of_steps() -> list[str]:
    """What a rank does one after the other, forward and backward."""
    seen: list[str] = []
    begin, wait = Circle.exchange, functional.Pending.wait
    attend_one, attend_back = merging.attend, merging.attend_backward

    def told(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            seen.append(name)
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Circle, "exchange", told("start", begin))
        patch.setattr(functional.Pending, "wait", told("wait", wait))
        patch.setattr(merging, "attend", told("compute", attend_one))
        patch.setattr(merging, "attend_backward", told("compute", attend_back))
        out = attend("ring", 8)
        seen.append("backward")
        out.own.sum().backward()
    return seen


def test_messages_travel_while_a_rank_computes() -> None:
    """Those of keys and values from before a block is computed to after it, gradients while the next one is."""
    forward = ["start", "compute", "wait", "start", "compute", "wait", "compute"]
    backward = ["start", "compute", "wait", "start", "compute", "start", "wait", "compute", "start", "wait", "wait"]
    for found in run_on_ranks(3, order_of_steps):
        assert found == [*forward, "backward", *backward]


# -------------------------------------------------------------------- choices


@pytest.mark.parametrize(
    ("count", "heads", "key_heads", "is_causal", "method"),
    [
        (2, 32, 32, False, "ulysses"),  # multi-head: always
        (8, 32, 32, False, "ulysses"),
        (2, 32, 8, False, "ring"),  # four queries to a key: up to 3 ranks
        (4, 32, 8, False, "ulysses"),
        (4, 32, 4, False, "ring"),  # eight: up to 5
        (4, 32, 8, True, "ring"),  # a causal ring sends three quarters
        (3, 4, 4, False, "ring"),  # heads that do not divide
        (6, 4, 4, False, "hybrid"),
        (16, 32, 8, True, "hybrid"),
        (16, 8, 8, False, "hybrid"),
    ],
)
def test_auto_sends_the_fewest_bytes(count: int, heads: int, key_heads: int, is_causal: bool, method: str) -> None:
    choices = {
        ContextAttention().chosen(pretend(rank, count).zigzag(64 * count), heads, key_heads, is_causal=is_causal)
        for rank in range(count)
    }
    (choice,) = choices
    assert choice.method == method
    assert choice.reason.startswith("a rank sends ")


def test_auto_takes_a_ring_where_positions_differ_in_a_mask() -> None:
    choice = ContextAttention().chosen(pretend(0, 8).zigzag(64), 32, 32, has_rows=True)
    assert (choice.method, choice.team) == ("ring", 1)
    assert "keeps its own rows" in choice.reason
