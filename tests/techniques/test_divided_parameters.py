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
from tests.curves import compare_weights
from tests.models import points
from tests.ranks import begun_on_one, ranks, run_on_ranks
from tests.tiers import sampled
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

    def __init__(self, between: Callable[["Stepping"], Any]) -> None:
        super().__init__()
        self.between = between
        self.automatic_optimization = False
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.averages = nn.ParameterList(
            nn.Parameter(p.detach().clone(), requires_grad=False) for p in self.layers.parameters()
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0][:, :8]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for layer in self.layers:
            x = layer(x)
        self.manual_backward(x.square().mean())
        self.between(self)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers.parameters(), lr=0.3, momentum=0.9)


def clips(module: Stepping) -> None:
    nn.utils.clip_grad_norm_(module.layers.parameters(), 0.05)


def clips_values(module: Stepping) -> None:
    nn.utils.clip_grad_value_(module.layers.parameters(), 1e-3)


def adds_noise(module: Stepping) -> None:
    for parameter in module.layers.parameters():
        assert parameter.grad is not None
        parameter.grad.add_(parameter.detach() * 0.1)
        parameter.grad = parameter.grad * 0.5


def keeps_small(module: Stepping) -> None:
    for parameter in module.layers.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def decays(module: Stepping) -> None:
    with torch.no_grad():
        for layer in module.layers:
            layer.up.weight.mul_(0.9)
            layer.down.weight[:, 3] = 0.1
            layer.down.weight.data = layer.down.weight.data - 0.01


def averages(module: Stepping) -> None:
    with torch.no_grad():
        for average, parameter in zip(module.averages, module.layers.parameters(), strict=True):
            average.lerp_(parameter, 0.3)


def copies(module: Stepping) -> None:
    other = copy.deepcopy(module.layers)
    with torch.no_grad():
        for average, parameter in zip(module.averages, other.parameters(), strict=True):
            average.copy_(parameter)


DEEDS = {each.__name__: each for each in (clips, clips_values, adds_noise, keeps_small, decays, averages, copies)}


def weights(deed: str, strategy: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Stepping(DEEDS[deed])
    fit = trainer(strategy, max_epochs=1, limit_val_batches=0)
    fit.fit(module, DataLoader(points(16, seed=1), 4))
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@sampled(4, "deed", DEEDS)
def test_a_step_by_hand(deed: str) -> None:
    expected = begun_on_one(weights, deed, "auto")
    for got in run_on_ranks(2, weights, deed, TensorParallelStrategy(2, plan=PLAN)):
        compare_weights(expected.result(), got, 1e-5)


class Rows(Stepping):
    """Computes with rows of divided weights, of which autograd keeps values."""

    def __init__(self) -> None:
        super().__init__(clips)
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, row = batch[0][:, :8], self.layers[1].up.weight[3]
        for layer in self.layers:
            x = layer(x) * layer.up.weight[0] + x @ row[:, None]
        return x.square().mean()


def weights_by_rows(strategy: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Rows()
    trainer(strategy, max_epochs=1, limit_val_batches=0).fit(module, DataLoader(points(16, seed=1), 4))
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def test_what_autograd_keeps_of_a_row_is_what_it_keeps_on_one_device() -> None:
    expected = begun_on_one(weights_by_rows, "auto")
    for got in run_on_ranks(2, weights_by_rows, TensorParallelStrategy(2, plan=PLAN)):
        compare_weights(expected.result(), got, 1e-5)


@ranks(2)
def test_rows_that_are_changed_later_are_refused_or_keep_their_values() -> None:
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


class Alone(LightningModule):
    """A linear map, or an embedding, alone: no pair of maps leads into features and out of them."""

    def __init__(self, embeds: bool) -> None:
        super().__init__()
        self.embeds = embeds
        self.table, self.seen = nn.Embedding(7, 6), nn.Conv1d(1, 3, 3)
        self.head = nn.Identity() if embeds else nn.Linear(18, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.seen(batch[0][:, None, :8])
        x = self.head(x.flatten(1)).softmax(-1) + self.table(batch[0][:, :1].abs().long() % 7).sum((1, 2))[:, None]
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def weights_alone(embeds: bool, strategy: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Alone(embeds)
    fit = trainer(strategy, max_epochs=1, limit_val_batches=0)
    fit.fit(module, DataLoader(points(16, seed=1), 4))
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("embeds", [False, True])
def test_what_is_alone_is_divided(embeds: bool) -> None:
    expected = begun_on_one(weights_alone, embeds, "auto")
    for got in run_on_ranks(2, weights_alone, embeds, TensorParallelStrategy(2)):
        compare_weights(expected.result(), got, 1e-5)
