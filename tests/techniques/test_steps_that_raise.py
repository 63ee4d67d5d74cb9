"""An optimizer that raises leaves what it stepped as on one device, for who handles the exception and goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from lightning_parallel import HybridStrategy, TensorParallel, TensorParallelStrategy, Zero, ZeroStrategy
from tests.ranks import begun_on_one, run_on_ranks
from tests.tiers import covering
from tests.trainers import trainer


class Raising(optim.SGD):
    """Raises in its second step, before it does anything, and in its third, after it did."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.count = vars(self).get("count", 0) + 1
        if self.count == 2:
            if closure is not None:
                closure()
            raise ArithmeticError("no step")
        loss = super().step(closure)
        if self.count == 3:
            raise ArithmeticError("a step")
        return loss


class Climbing(Raising):
    """Looks at parameters again after the step of the class that it extends."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(0.01 * parameter.sign())
        return loss


class Handling(LightningModule):
    """Goes on where its optimizer raises, in steps of manual optimization."""

    def __init__(self, kind: type[optim.Optimizer]) -> None:
        super().__init__()
        self.kind, self.automatic_optimization = kind, False
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for layer in self.layers:
            batch = batch + layer(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(batch.square().mean())
        try:
            optimizer.step()
        except ArithmeticError:
            self.count = 1 + vars(self).get("count", 0)

    def configure_optimizers(self) -> optim.Optimizer:
        return self.kind(self.parameters(), lr=0.1, momentum=0.9)


def weights(make_strategy: Callable[[], Any] | str, kind: type[optim.Optimizer], batch: int) -> dict[str, Tensor]:
    if torch.distributed.is_initialized() and torch.distributed.get_rank() % 2:
        kind.__base__([nn.Parameter(torch.zeros(()))], lr=0.1)  # torch has hooks run by this class, too, from here on
    torch.manual_seed(0)
    module, data = Handling(kind), torch.randn(24, 6, dtype=torch.float64)
    trainer(
        make_strategy if isinstance(make_strategy, str) else make_strategy(), max_epochs=1, precision="64-true"
    ).fit(module, DataLoader(data, batch))
    assert module.count == 2
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


LAYOUTS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "zero 1": (partial(ZeroStrategy, stage=1), 2, 2),
    "zero 2, offloaded": (partial(ZeroStrategy, stage=2, offload=True), 2, 2),
    "zero 3": (ZeroStrategy, 2, 2),
    "tensor parallel": (TensorParallelStrategy, 2, 1),
    "tensor parallel, zero 3": (partial(HybridStrategy, TensorParallel(2), Zero(2)), 4, 2),
}


@covering(keep=1, layout=LAYOUTS, kind=[Raising, Climbing])
def test_training_goes_on_as_on_one_device(layout: str, kind: type[optim.Optimizer]) -> None:
    strategy, ranks, readers = LAYOUTS[layout]
    expected = begun_on_one(weights, "auto", kind, 4)
    for got in run_on_ranks(ranks, weights, strategy, kind, 4 // readers):
        torch.testing.assert_close(got, expected.result(), rtol=1e-9, atol=1e-11)
