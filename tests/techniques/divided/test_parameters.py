"""What a user's step does with parameters that ranks have divided, it does with those of one device."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import ParallelPlan, TensorParallelStrategy
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.tensor import Divided
from tests.models import points
from tests.ranks import ranks
from tests.strategies.one_and_two import assert_like_one_device
from tests.trainers import trainer

PLAN = ParallelPlan(blocks="layers.*", styles={"layers.*.up": "colwise", "layers.*.down": "rowwise"})


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Stepping(LightningModule):
    """Steps by hand, and does something with parameters between backward and the optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.averages, self.copies = (
            nn.ParameterList(nn.Parameter(p.detach().clone(), requires_grad=False) for p in self.layers.parameters())
            for _ in range(2)
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0][:, :8]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for layer in self.layers:
            x = layer(x)
        self.manual_backward(x.square().mean())
        self.change()
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers.parameters(), lr=0.3, momentum=0.9)

    def change(self) -> None:
        nn.utils.clip_grad_norm_(self.layers.parameters(), 0.05)
        nn.utils.clip_grad_value_(self.layers.parameters(), 1e-2)
        for parameter in self.layers.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach() * 0.1)
            parameter.grad = parameter.grad * 0.5
            parameter.data.clamp_(-0.3, 0.3)
        with torch.no_grad():
            for layer in self.layers:
                layer.up.weight.mul_(0.9)
                layer.down.weight[:, 3] = 0.1
                layer.down.weight.data = layer.down.weight.data - 0.01
            for average, parameter in zip(self.averages, self.layers.parameters(), strict=True):
                average.lerp_(parameter, 0.3)
            for kept, parameter in zip(self.copies, copy.deepcopy(self.layers).parameters(), strict=True):
                kept.copy_(parameter)


class Rows(Stepping):
    """Computes with rows of divided weights, of which autograd keeps values."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, row = batch[0][:, :8], self.layers[1].up.weight[3]
        for layer in self.layers:
            x = layer(x) * layer.up.weight[0] + x @ row[:, None]
        return x.square().mean()


class Alone(LightningModule):
    """A linear map, or an embedding, alone: no pair of maps leads into features and out of them."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.table, self.seen, self.head = nn.Embedding(7, 6), nn.Conv1d(1, 3, 3), head

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.seen(batch[0][:, None, :8])
        x = self.head(x.flatten(1)).softmax(-1) + self.table(batch[0][:, :1].abs().long() % 7).sum((1, 2))[:, None]
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


MODULES: dict[str, tuple[Callable[[], LightningModule], Any]] = {
    "changed between backward and step": (Stepping, PLAN),
    "rows": (Rows, PLAN),
    "alone": (lambda: Alone(nn.Linear(18, 5)), None),
    "embedding alone": (lambda: Alone(nn.Identity()), None),
}


def trained(strategy: Any) -> list[dict[str, Tensor]]:
    found = []
    for make, plan in MODULES.values():
        torch.manual_seed(0)
        module = make()
        fit = trainer("auto" if strategy is None else strategy(2, plan=plan), max_epochs=1, limit_val_batches=0)
        fit.fit(module, DataLoader(points(16, seed=1), 4))
        found.append({name: tensor.detach().clone() for name, tensor in module.state_dict().items()})
    return found


def test_steps_do_with_parameters_what_they_do_on_one_device() -> None:
    assert_like_one_device(trained, 2, (None,), (TensorParallelStrategy,), rtol=1e-5)


@ranks(2)
def test_rows_that_are_changed_later_are_refused_or_keep() -> None:
    """Autograd has what was gathered: a change of the weight is an error while there is a view, and else none of it."""
    elements = Ranks(dist.group.WORLD, "tp").elements(6, [[(0, 3)], [(3, 6)]])
    for change in (
        lambda weight: weight.mul_(2),
        lambda weight: weight.detach().mul_(2),
        lambda weight: weight.data.mul_(2),
        lambda weight: weight[1].mul_(2),
    ):
        weight = Divided(nn.Parameter(torch.ones(3, 4)), {0: elements})
        row = weight[1]
        loss = (row * torch.ones(4, requires_grad=True)).sum()
        with torch.no_grad():
            change(weight)
        with pytest.raises(RuntimeError, match=r"modified|while there is a view of what was gathered"):
            (weight.sum() + loss).backward()
        elements.ranks.viewed.clear()
    weight = Divided(nn.Parameter(torch.ones(3, 4)), {0: elements})
    factor = torch.ones(4, requires_grad=True)
    loss = (weight[1] * factor).sum()
    weight.data = torch.zeros(6, 4)
    loss.backward()
    assert torch.equal(factor.grad, torch.ones(4))
