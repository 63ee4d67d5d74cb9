"""What compares samples with each other sees those of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import DataParallelStrategy, ParallelPlan
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.whole_batch import WholeBatch
from lightning_parallel.techniques.tools.meeting import meeting_of, uses_of
from tests.models import Optimized, adamw
from tests.ranks import ranks, run_on_ranks
from tests.trainers import trainer

made: dict[str, Any] = {"nn": nn, "__name__": "nowhere"}
exec("class Elsewhere(nn.Linear): pass", made)


class Contrast(nn.Module):
    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        logits = F.normalize(one, dim=1) @ F.normalize(other, dim=1).t()
        return F.cross_entropy(10 * logits, torch.arange(len(logits)))


class Pairs(Optimized):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network, self.contrast, self.make_optimizer = made["Elsewhere"](6, 4), Contrast(), adamw

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(whole_batch="contrast")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.contrast(*map(self.network, batch.unbind(1)))
        if self._trainer is not None:
            self.log("train_loss", loss)
        return loss


def trained(samples: int) -> list[Any]:
    module = Pairs()
    data = DataLoader(torch.randn(16, 2, 6, generator=torch.Generator().manual_seed(1)), batch_size=samples)
    run = trainer(DataParallelStrategy(), max_epochs=2)
    run.fit(module, data)
    return [run.callback_metrics["train_loss"], *module.state_dict().values()]


def test_a_contrast_of_all_samples_in_a_class_of_no_file() -> None:
    (expected,) = run_on_ranks(1, trained, 8)
    for found in run_on_ranks(2, trained, 4):
        torch.testing.assert_close(found, expected)


@ranks(2)
def test_what_saw_the_whole_batch_is_not_warned_of() -> None:
    module, batch = Pairs(), torch.randn(4, 2, 6)
    assert meeting_of(module.training_step(batch, 0), 4) is not None
    WholeBatch(module, Ranks(dist.group.WORLD, "data"), module.parallel_plan())
    loss = module.training_step(batch, 0)
    assert meeting_of(loss, 4) is None
    assert uses_of(loss, [], 4).bent is None
