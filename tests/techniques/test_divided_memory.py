"""What lies where: results of divided tensors share memory and have strides as those of whole tensors do."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.tensor import Divided
from tests.ranks import ranks


@ranks(2)
def test_what_is_gathered_is_contiguous() -> None:
    """Also where each rank has one element of the dimension."""
    among = Ranks(dist.group.WORLD, "tp")
    whole = torch.arange(48.0).view(3, 2, 8)
    elements = among.chunks(2)
    divided = Divided(elements.take(whole, 1).clone(), {1: elements})
    assert divided.whole().is_contiguous()
    assert torch.equal(divided.whole().view(6, 8), whole.view(6, 8))
    assert torch.equal(divided.as_strided((4, 3), (8, 2), 1), whole.as_strided((4, 3), (8, 2), 1))
