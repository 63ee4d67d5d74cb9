"""A plain `loss.backward()` in manual optimization is refused; one for tensors of the step alone is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import DataParallelStrategy, TensorParallelStrategy, ZeroStrategy
from tests.ranks import begun_on_one, run_on_ranks
from tests.trainers import trainer


class Attacked(LightningModule):
    """A pass for a tensor of the step alone, before that for the parameters."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.net, self.plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), plain

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        noise = torch.zeros(6, dtype=batch.dtype, requires_grad=True)
        self.net(torch.ones(6, dtype=batch.dtype) + noise).square().mean().backward(inputs=[noise])
        assert noise.grad is not None
        loss = self.net(batch).square().mean() * (1 + noise.grad.square().sum())
        if self.plain:
            loss.backward()
        else:
            self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


STRATEGIES = [DataParallelStrategy, ZeroStrategy, TensorParallelStrategy]


def trained(strategy: Any, plain: bool, batch_size: int) -> dict[str, Tensor]:
    module, data = Attacked(plain), torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    made = "auto" if strategy is None else strategy()
    trainer(made, max_epochs=1, precision="64-true").fit(module, DataLoader(data, batch_size))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def refused(strategy: Any) -> None:
    with pytest.raises(RuntimeError, match=r"call self\.manual_backward\(loss\)"):
        trained(strategy, True, 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plain_backward_is_refused(strategy: Any) -> None:
    run_on_ranks(2, refused, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pass_for_tensors_of_the_step_alone_is_that_of_one_device(strategy: Any) -> None:
    expected = begun_on_one(trained, None, False, 4)
    for found in run_on_ranks(2, trained, strategy, False, 4 if strategy is TensorParallelStrategy else 2):
        torch.testing.assert_close(found, expected.result(), rtol=1e-9, atol=1e-11)
