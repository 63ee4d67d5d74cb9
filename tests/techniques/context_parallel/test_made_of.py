"""What is made of a tensor once: kept while it lives unchanged, found by all ranks alike."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.made_of import KEPT, MadeOf, version
from lightning_parallel.techniques.context_parallel.attention import ContextAttention
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import run_on_ranks
from tests.techniques.context_parallel.test_work import SIZE, WIDTH, counted


def test_what_was_made_of_a_tensor_lives_as_long_as_it() -> None:
    calls, memory = [], MadeOf()

    def get(tensor: Tensor, name: str = "rows") -> int:
        return memory.plain(tensor).get(name, lambda: calls.append(1) or len(calls))

    tensor = torch.ones(4, 4)
    assert [get(tensor), get(tensor), get(tensor[:2]), get(tensor[:2]), get(tensor, "table")] == [1, 1, 2, 2, 3]
    tensor.add_(1)
    assert get(tensor) == 4, "it was changed"
    with torch.inference_mode():
        unknown = torch.ones(2)
        assert [get(unknown), get(unknown)] == [5, 6], "nobody knows whether it was changed"
    for number in range(4):
        for start in range(4):
            get(tensor[start:, number:])
    assert get(tensor) != 4, f"of a tensor {KEPT} views are remembered"
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert gone() is None
    assert not memory._kept


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
