"""Buffers that ranks change are united among those that hold them."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import DataParallelStrategy, ZeroStrategy
from lightning_parallel.strategies.model.buffers import Buffers
from tests.heard import heard
from tests.ranks import ranks, run_on_ranks
from tests.trainers import trainer


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


class Queues(LightningModule):
    """Keeps a queue of samples by hand, a running mean by a norm, and a moving average of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.register_buffer("queue", torch.zeros(8, 4))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("slow", torch.zeros(6, 4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.queue: Tensor
            self.queue[self.place : self.place + len(batch[0])] = batch[0]
            self.place = (self.place + len(batch[0])) % 8
            self.slow: Tensor = 0.9 * self.slow + 0.1 * self.net[0].weight
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def told(strategy: Any) -> str:
    with heard() as lines:
        data = DataLoader(TensorDataset(torch.randn(8, 4)), 2)
        trainer(strategy(), max_epochs=2).fit(Queues(), data, data)
    return "\n".join(lines)


@pytest.mark.parametrize("strategy", [DataParallelStrategy, partial(ZeroStrategy, stage=3)])
def test_buffers_that_ranks_change_apart_are_told_once(strategy: Any) -> None:
    said, *others = run_on_ranks(2, told, strategy)
    assert said.count("changed these buffers by its own samples: queue. ") == 1
    assert "changed these buffers" not in "".join(others)
