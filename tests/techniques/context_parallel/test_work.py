"""What attention over a divided sequence costs: bytes, memory, scores, order of messages, and what `auto` takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.collectives import functional, rows
from lightning_parallel.collectives.derived_cache import version
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.spans import Runs, bounds, joined
from lightning_parallel.techniques.context_parallel import ContextParallel, ring
from lightning_parallel.techniques.context_parallel.attention import (
    ContextAttention,
    grid_of,
    schedule_by_mask,
    schedule_of,
)
from lightning_parallel.techniques.context_parallel.blocks import Piece, Relation
from lightning_parallel.techniques.divided.tensor import Divided
from tests.live import kept_for_backward
from tests.ranks import run_on_ranks
from tests.techniques.context_parallel.test_attention import documents, group_of, window

WIDTH, BYTES = 8, 8
B, H, SIZE = 2, 8, 64


def zigzag(count: int, size: int) -> tuple[Runs, ...]:
    """Positions of each rank, two chunks of 2 x count."""
    pairs = [(rank, 2 * count - 1 - rank) for rank in range(count)]
    return tuple(joined(bounds(size, 2 * count, number) for number in pair) for pair in pairs)


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that this rank sends to others, by message."""
    sent: list[int] = []
    collectives = {
        "all_gather": lambda output, shard, group: output.nbytes - shard.nbytes,
        "reduce_scatter": lambda output, tensor, group: tensor.nbytes - output.nbytes,
        "exchange": lambda to, received, group: sum(tensor.nbytes for tensor in to.values()),
        "exchange_rows": lambda given, to, received, group: given.nbytes // len(given) * (sum(to) - to[group.rank()]),
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
            (rows, "exchange_rows"),
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


FORMS = [(method, heads) for method in ("ring", "ulysses", "all_gather") for heads in (8, 2)]
FORMS += [("hybrid", 8), ("hybrid", 4)]


def bytes_of_layers() -> list[tuple[int, int]]:
    """Of each form, and at last of a causal ring."""
    return [*(bytes_of_a_layer(*form, False) for form in FORMS), bytes_of_a_layer("ring", 2, True)]


def test_bytes_are_those_of_the_closed_form() -> None:
    *forms, causal = zip(*run_on_ranks(4, bytes_of_layers), strict=True)
    for form, found in zip(FORMS, forms, strict=True):
        assert set(found) == {closed_form(form[0], 4, H, form[1])}, form
    whole = closed_form("ring", 4, H, 2)
    forward, backward = (sum(each) / 4 for each in zip(*causal, strict=True))
    assert (forward, backward) == (0.75 * whole[0], 0.75 * whole[1]), "a later half meets nobody's earlier positions"
    assert max(each[0] for each in causal) == whole[0]


KEEPS = list(itertools.product(("ring", "ulysses", "all_gather", "hybrid"), (True, False)))


def memory_of_layers() -> list[int]:
    return [kept_for_backward(partial(attend, method, 4, causal, size=512)) for method, causal in KEEPS]


def test_what_is_kept_is_a_ranks_part() -> None:
    given = [torch.randn(B, heads, 512, WIDTH, dtype=torch.float64, requires_grad=True) for heads in (H, 4, 4)]
    whole = kept_for_backward(lambda: F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True))
    for of_layers in run_on_ranks(4, memory_of_layers):
        assert max(of_layers) <= 1.03 * whole / 4, dict(zip(KEEPS, of_layers, strict=True))


def scores_of(piece: Piece) -> int:
    """How many are computed, as a measure of work."""
    rows, keys = (stop - start for start, stop in (piece.rows, piece.keys))
    return rows * (rows + 1) // 2 if piece.relation == Relation.DIAGONAL else rows * keys


@pytest.mark.parametrize(("count", "size"), [(2, 512), (4, 500), (8, 4097)])
def test_ranks_of_a_zigzag_have_equal_work(count: int, size: int) -> None:
    def work(runs: tuple[Runs, ...]) -> list[int]:
        schedules = [schedule_of(grid_of(runs, rank, 1), True) for rank in range(count)]
        assert (
            all(block.pieces for each in schedules for block in each.blocks)
            or runs[0][0][1] != bounds(size, 2 * count, 0)[1]
        )
        return [sum(scores_of(piece) for block in each.blocks for piece in block.pieces) for each in schedules]

    scores = work(zigzag(count, size))
    assert sum(scores) == size * (size + 1) // 2, "nothing is computed that the order rules out"
    assert max(scores) * count / sum(scores) <= 1.10
    contiguous = work(tuple((bounds(size, count, rank),) for rank in range(count)))
    assert max(contiguous) * count / sum(contiguous) >= 1.4


def test_step_takes_few_calls() -> None:
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
    return [(piece.relation.name, scores_of(piece)) for block in schedule.blocks for piece in block.pieces]


def relations_and_bytes(masks: list[Tensor], size: int) -> tuple[list[list[tuple[str, int]]], int]:
    """Of some masks; and of a window over long runs, what the second layer sends."""
    distance = torch.arange(size)[:, None] - torch.arange(size)
    mask = ((distance >= 0) & (distance < 64))[None, None]
    elements = group_of("ring").zigzag(size)
    given = [Divided(torch.randn(1, 1, elements.length, WIDTH), {2: elements}) for _ in range(3)]
    F.scaled_dot_product_attention(*given, attn_mask=mask)
    with counted() as sent:
        F.scaled_dot_product_attention(*given, attn_mask=mask)
    return [relations_of(each) for each in (*masks, mask)], sum(sent)


def test_what_a_mask_rules_out_is_not_computed_or_sent() -> None:
    everything = torch.ones(SIZE, SIZE, dtype=torch.bool)
    ids, order = torch.arange(SIZE) * 8 // SIZE, SIZE * (SIZE + 1) // 2
    packed = (ids[:, None] == ids) & everything.tril()
    masks = [everything.tril()[None, None], everything[None, None], packed[None, None], documents(SIZE), window(SIZE)]
    ranks = run_on_ranks(4, relations_and_bytes, masks, 4096)
    found = []
    for of_ranks in zip(*(relations for relations, _ in ranks), strict=True):
        every = [each for relations in of_ranks for each in relations]
        found.append((sum(scores for _, scores in every), {name for name, _ in every}))
    causal, full, chunks, some, near, long = found
    assert causal == (order, {"ALL", "DIAGONAL"}), "a causal mask is seen as one"
    assert full == (SIZE**2, {"ALL"})
    # Chunks 3 and 4 lie side by side on the last rank: one rectangle, half of which the mask rules out.
    assert chunks == (6 * 8 * 9 // 2 + 16 * 16, {"DIAGONAL", "MASKED"})
    assert some[0] < 0.8 * order
    assert some[1] == {"DIAGONAL", "MASKED", "ALL"}
    # each chunk meets itself and the one before it
    assert near == (6 * 8 * 8 + 16 * 16 + 4 * 8 * 8 + 2 * 8 * 16, {"MASKED"})
    tile = 256  # half a chunk of the long runs: parts of them are left out
    assert long[0] == (16 + 15) * tile**2
    assert sum(sent for _, sent in ranks) == 6 * tile * 2 * WIDTH * 4, "across the six borders between ranks"


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
def test_auto_takes_ulysses_where_heads_divide_without_masks(
    heads: int, key_heads: int, count: int, has_rows: bool, team: int
) -> None:
    assert ContextAttention().team_size(heads, key_heads, count, has_rows) == team


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"method": "hybrid"}, "method='hybrid' needs the number of ranks in a team, such as ulysses_size=2"),
        ({"method": "ring", "ulysses_size": 2}, "no other method takes it"),
        ({"size": 4, "method": "hybrid", "ulysses_size": 3}, r"4 ranks do not form such teams; set it to one of \[2\]"),
        ({"size": 3, "method": "hybrid", "ulysses_size": 3}, "use method='ulysses' or 'ring'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ContextParallel(**arguments)


def layers_of_two_steps() -> list[int]:
    """How many messages a layer sends, where each step divides the same batch anew."""
    group = Ranks(dist.group.WORLD, "sequence")
    group.attention = ContextAttention("ring")
    elements, counts = group.zigzag(SIZE), []
    batch = torch.ones(1, SIZE, dtype=torch.bool)
    for _ in range(2):
        seen: Any = Divided(elements.take(batch, 1), {1: elements})  # of the last rank a view, of others a copy
        mask = seen[:, None, :, None]
        for _ in range(2):
            given = [Divided(torch.randn(1, 1, elements.length, WIDTH), {2: elements}) for _ in range(3)]
            with counted() as sent:
                F.scaled_dot_product_attention(*given, attn_mask=mask)
            counts.append(len(sent))
    return counts


def test_version_tells_new_memory_from_restored_memory() -> None:
    tensor = torch.zeros(1 << 20)
    before, storage = version(tensor), tensor.untyped_storage()
    size = storage.size()
    storage.resize_(0)  # as ZeRO 3 lets go of what it gathered
    others = torch.zeros(1 << 20)  # which takes its place
    storage.resize_(size)
    assert version(tensor) == before
    tensor.data = others
    assert version(tensor) != before


def test_ranks_look_at_a_mask_together() -> None:
    for found in run_on_ranks(2, layers_of_two_steps):
        assert found == [2, 1, 2, 1], "its rows once a step, then keys and values alone"
