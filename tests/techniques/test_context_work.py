"""What attention over a divided sequence costs: bytes, memory, scores, order of messages, and what `auto` takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.collectives import functional, rows
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.spans import Runs, bounds, joined
from lightning_parallel.techniques.context_parallel import ContextParallel, ring
from lightning_parallel.techniques.context_parallel.attention import (
    ContextAttention,
    grid_of,
    schedule_by_mask,
    schedule_of,
)
from lightning_parallel.techniques.context_parallel.blocks import Relation
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import run_on_ranks
from tests.techniques.test_context_attention import documents, group_of, window

WIDTH, BYTES = 8, 8
B, H, SIZE = 2, 8, 64


def zigzag(count: int, size: int) -> tuple[Runs, ...]:
    """Positions of each rank, two chunks of 2 x count."""
    pairs = [(rank, 2 * count - 1 - rank) for rank in range(count)]
    return tuple(joined(bounds(size, 2 * count, number) for number in pair) for pair in pairs)


# -------------------------------------------------------------------- bytes


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that this rank sends to others, by message."""
    sent: list[int] = []
    collectives = {
        "all_gather": lambda output, shard, group: output.nbytes - shard.nbytes,
        "reduce_scatter": lambda output, tensor, group: tensor.nbytes - output.nbytes,
        "exchange": lambda to, received, group: sum(tensor.nbytes for tensor in to.values()),
        "exchanged": lambda given, to, received, group: given.nbytes // len(given) * (sum(to) - to[group.rank()]),
    }

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            if number := collectives[name](*args):
                sent.append(number)
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (functional, "all_gather"),
            (functional, "reduce_scatter"),
            (ring, "exchange"),
            (rows, "exchanged"),
        ):
            patch.setattr(module, name, counting(name, getattr(module, name)))
        yield sent


def attend(method: str, key_heads: int, is_causal: bool = False, mask: Tensor | None = None, size: int = SIZE) -> Any:
    elements = group_of(method).zigzag(size)
    shapes = [(B, heads, elements.length, WIDTH) for heads in (H, key_heads, key_heads)]
    given = [Divided(torch.randn(shape, dtype=torch.float64, requires_grad=True), {2: elements}) for shape in shapes]
    return F.scaled_dot_product_attention(*given, attn_mask=mask, is_causal=is_causal, enable_gqa=key_heads != H)


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


def test_causal_ring_sends_three_quarters() -> None:
    """A rank's later half meets nobody's earlier positions."""
    found = run_on_ranks(4, bytes_of_a_layer, "ring", 2, True)
    forward, backward = (sum(each) / 4 for each in zip(*found, strict=True))
    whole = closed_form("ring", 4, H, 2)
    assert (forward, backward) == (0.75 * whole[0], 0.75 * whole[1])
    assert max(each[0] for each in found) == whole[0]


def bytes_with_documents(count: int) -> tuple[int, int]:
    """The first layer, in which ranks gather what they see in the mask, and the second."""
    ids = torch.arange(SIZE) * count // SIZE
    mask = (ids[:, None] == ids) & torch.ones(SIZE, SIZE, dtype=torch.bool).tril()
    elements, layers = group_of("ring").zigzag(SIZE), []
    for _ in range(2):
        with counted() as sent:
            given = [Divided(torch.randn(B, H, elements.length, WIDTH), {2: elements}) for _ in range(3)]
            F.scaled_dot_product_attention(*given, attn_mask=mask)
        layers.append(sum(sent))
    return layers[0], layers[1]


def test_documents_that_end_with_a_chunk_stay_where_they_are() -> None:
    table = 2 * 7 + 1  # the relations of a rank's runs, of which rank 3 has one, to all
    for first, second in run_on_ranks(4, bytes_with_documents, 8):
        assert (first, second) == (3 * table, 0)
    half = SIZE // 8 * B * H * WIDTH * 4 * 2
    found = [second for _, second in run_on_ranks(4, bytes_with_documents, 4)]
    # Documents of two chunks, 0-1, 2-3, 4-5, 6-7: the later chunk needs the earlier one. Rank 3 has both 3 and 4.
    assert found == [half, half, half, 2 * half]


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


@pytest.mark.parametrize(("count", "size"), list(itertools.product([2, 4, 8], [512, 500, 4097])))
def test_ranks_of_a_zigzag_have_equal_work(count: int, size: int) -> None:
    def work(runs: tuple[Runs, ...]) -> list[int]:
        schedules = [schedule_of(grid_of(runs, rank, 1), True) for rank in range(count)]
        assert (
            all(block.pieces for each in schedules for block in each.blocks)
            or runs[0][0][1] != bounds(size, 2 * count, 0)[1]
        )
        return [sum(piece.scores for block in each.blocks for piece in block.pieces) for each in schedules]

    scores = work(zigzag(count, size))
    assert sum(scores) == size * (size + 1) // 2, "nothing is computed that the order rules out"
    assert max(scores) * count / sum(scores) <= 1.10
    contiguous = work(tuple((bounds(size, count, rank),) for rank in range(count)))
    assert max(contiguous) * count / sum(contiguous) >= 1.4


def test_a_step_takes_few_calls() -> None:
    for rank in range(4):
        grid = grid_of(zigzag(4, 64), rank, 1)
        calls = [[piece.relation.name for piece in block.pieces] for block in schedule_of(grid, True).blocks]
        assert calls == [["DIAGONAL", "ALL", "DIAGONAL"] if rank < 3 else ["DIAGONAL"], ["ALL"], ["ALL"], ["ALL"]]
        whole = [[piece.relation for piece in block.pieces] for block in schedule_of(grid, False).blocks]
        assert whole == [[Relation.ALL]] * 4


def relations_of(mask: Tensor) -> list[tuple[str, int]]:
    """What one rank computes: relations and numbers of scores."""
    elements = Ranks(dist.group.WORLD, "sequence").zigzag(mask.shape[-1])
    schedule = schedule_by_mask(elements.take(mask, 2), grid_of(elements.runs, dist.get_rank(), 1), elements)
    assert schedule is not None
    return [(piece.relation.name, piece.scores) for block in schedule.blocks for piece in block.pieces]


def counted_scores(mask: Tensor) -> tuple[int, set[str]]:
    found = [each for rank in run_on_ranks(4, relations_of, mask) for each in rank]
    return sum(scores for _, scores in found), {name for name, _ in found}


def test_what_a_mask_rules_out_is_not_computed() -> None:
    everything = torch.ones(SIZE, SIZE, dtype=torch.bool)
    order = SIZE * (SIZE + 1) // 2
    assert counted_scores(everything.tril()[None, None]) == (order, {"ALL", "DIAGONAL"}), "a causal mask is seen as one"
    assert counted_scores(everything[None, None]) == (SIZE**2, {"ALL"})
    ids = torch.arange(SIZE) * 8 // SIZE
    packed = ((ids[:, None] == ids) & everything.tril())[None, None]
    # Chunks 3 and 4 lie side by side on the last rank: one rectangle, half of which the mask rules out.
    assert counted_scores(packed) == (6 * 8 * 9 // 2 + 16 * 16, {"DIAGONAL", "MASKED"})
    scores, relations = counted_scores(documents(SIZE))
    assert scores < 0.8 * order
    assert relations == {"DIAGONAL", "MASKED", "ALL"}
    near = 6 * 8 * 8 + 16 * 16, 4 * 8 * 8 + 2 * 8 * 16  # each chunk meets itself and the one before it
    assert counted_scores(window(SIZE)) == (sum(near), {"MASKED"})


def bytes_and_scores(size: int) -> tuple[int, int]:
    """Of a window over long runs: what the second layer sends, and how many scores there are."""
    distance = torch.arange(size)[:, None] - torch.arange(size)
    mask = ((distance >= 0) & (distance < 64))[None, None]
    elements = group_of("ring").zigzag(size)
    given = [Divided(torch.randn(1, 1, elements.length, WIDTH), {2: elements}) for _ in range(3)]
    F.scaled_dot_product_attention(*given, attn_mask=mask)
    with counted() as sent:
        F.scaled_dot_product_attention(*given, attn_mask=mask)
    return sum(sent), sum(scores for _, scores in relations_of(mask))


def test_of_long_runs_parts_are_left_out() -> None:
    found = run_on_ranks(4, bytes_and_scores, 4096)
    tile = 256  # half a chunk: each meets itself and the one before it
    assert sum(scores for _, scores in found) == (16 + 15) * tile**2
    assert sum(sent for sent, _ in found) == 6 * tile * 2 * WIDTH * 4, "across the six borders between ranks"


# -------------------------------------------------------------------- order of messages


def order_of_steps() -> list[str]:
    """What a rank does one after the other, forward and backward."""
    seen: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            seen.append(name)
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "exchange", noted("start", ring.exchange))
        patch.setattr(functional.Pending, "wait", noted("wait", functional.Pending.wait))
        patch.setattr(ring, "attend", noted("compute", ring.attend))
        patch.setattr(ring, "attend_backward", noted("compute", ring.attend_backward))
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
    ("heads", "key_heads", "count", "has_rows", "team"),
    [
        (32, 32, 8, False, 8),  # Ulysses: heads divide
        (32, 4, 8, False, 8),  # each key head goes to two ranks
        (32, 8, 8, True, 1),  # a ring sends only what meets in the mask, and keeps its own rows of it
        (4, 4, 3, False, 1),  # heads that do not divide
        (12, 3, 4, False, 1),
    ],
)
def test_auto_takes_ulysses_where_heads_divide_and_no_mask_has_rows(
    heads: int, key_heads: int, count: int, has_rows: bool, team: int
) -> None:
    assert ContextAttention().team_size(heads, key_heads, count, has_rows) == team


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"method": "hybrid"}, "method='hybrid' needs the number of ranks in a team, as ulysses_size=2"),
        ({"method": "ring", "ulysses_size": 2}, "no other method takes it"),
        ({"size": 4, "method": "hybrid", "ulysses_size": 3}, r"4 ranks do not form such teams; use one of \[2\]"),
        ({"size": 3, "method": "hybrid", "ulysses_size": 3}, "use method='ulysses' or 'ring'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ContextParallel(**arguments)
