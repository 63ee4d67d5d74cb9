"""Learning rates that a step decides itself: the same on all ranks, or an error on all before they step apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import ParallelPlan
from tests.layouts import layouts
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.tiers import sampled
from tests.trainers import trainer


class Decides(LightningModule):
    """Learns faster where the loss is larger.

    Args:
        of: "own", the loss of the rank's rows, or "all", of the batch.
    """

    def __init__(self, of: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of = of
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.layers(batch[0]).square().mean()
        known = self.all_gather(loss.detach()).mean() if self.of == "all" else loss.detach()
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 * float(known) / (1 + float(known))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Cycles(Decides):
    """Schedules rates and momenta as torch does, of a rate that is a tensor."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.1))
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


def trained(kind: type[Decides], of: str, strategy: Any, batch_size: int) -> Any:
    samples = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    module = kind(of)
    trainer(made(strategy), max_epochs=1).fit(module, DataLoader(TensorDataset(samples), batch_size))
    return {name: value.clone() for name, value in module.state_dict().items()}


def refused(strategy: Any, batch_size: int) -> None:
    with pytest.raises(ValueError, match=r"learning rates.*same on every rank.*rank 0: \[0\..*rank 1.*all_gather"):
        trained(Decides, "own", strategy, batch_size)


LAYOUTS = layouts("data parallel", "zero 2", "zero 3") | layouts("pipeline", plan=ParallelPlan(blocks="layers.*"))


@pytest.mark.filterwarnings("ignore")
@sampled(3, "layout", LAYOUTS)
def test_rates_of_a_rank_s_own_loss_are_refused(layout: str) -> None:
    """In a pipeline only the last stage comes to it."""
    _, readers, strategy = LAYOUTS[layout]
    run_on_ranks(2, refused, strategy, 4 // readers)


@sampled(
    2, ("layout", "kind"), [*((layout, Cycles) for layout in LAYOUTS), ("data parallel", Decides), ("zero 3", Decides)]
)
def test_rates_that_are_the_same_on_all_ranks(layout: str, kind: type[Decides]) -> None:
    _, readers, strategy = LAYOUTS[layout]
    assert_like_one_device(trained, 2, (kind, "all", None, 4), (kind, "all", strategy, 4 // readers))
