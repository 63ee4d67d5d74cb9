"""Buffers that ranks change are united among those that hold them."""

import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.strategies.model.buffers import Buffers
from tests.ranks import ranks


@ranks(2)
def test_buffers_that_only_another_stage_changed_are_left_to_it() -> None:
    rank, module = dist.get_rank(), nn.Module()
    module.register_buffer(f"of_stage_{rank}", torch.zeros(2))
    alone = [dist.new_group([each]) for each in range(2)][rank]
    host = dist.group.WORLD
    assert host is not None
    buffers = Buffers(module, alone, host)
    if rank == 1:
        module.get_buffer("of_stage_1").add_(3)
    buffers.unite()
    assert module.get_buffer(f"of_stage_{rank}").tolist() == [3.0 * rank] * 2
