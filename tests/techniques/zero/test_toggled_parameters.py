"""Steps that freeze parameters, let them learn again, or step them, between the passes of one batch or after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.layouts import LAYOUTS
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.techniques.pipeline_parallel.test_penalties import Routed
from tests.tiers import sampled
from tests.trainers import trainer

WIDTH, LENGTH = 12, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.routed = nn.LayerNorm(WIDTH), Routed()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 27), nn.Linear(27, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.routed(x + self.down_proj(F.silu(self.up_proj(self.norm(x)))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, features)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]

    def penalty(self) -> Tensor:
        """Of weights, none of which a forward need have read before."""
        layer: Any = self.layers[0]
        held = (layer.up_proj.weight, layer.down_proj.weight, layer.routed.experts.up[1], self.head.weight)
        return sum((each.square().mean() for each in held), torch.zeros(()))


class Adversarial(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.maker, self.critic = Net(WIDTH), Net(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.maker.parameters(), lr=0.003), torch.optim.SGD(self.critic.parameters(), lr=0.05)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        maker, critic = self.optimizers()  # type: ignore[misc,union-attr]
        for optimizer, loss in ((critic, self.loss_of_critic), (maker, self.loss_of_maker)):
            with self.toggled_optimizer(optimizer):
                optimizer.zero_grad()
                self.manual_backward(loss(batch[0]))
                optimizer.step()

    def loss_of_critic(self, x: Tensor) -> Tensor:
        return F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(self.maker(x.flip(0)))).mean()

    def loss_of_maker(self, x: Tensor) -> Tensor:
        return F.softplus(-self.critic(self.maker(x.flip(0)))).mean()


class Penalised(Adversarial):
    """The penalty is read before any forward after the toggle."""

    def loss_of_critic(self, x: Tensor) -> Tensor:
        return self.critic.penalty() + super().loss_of_critic(x)

    def loss_of_maker(self, x: Tensor) -> Tensor:
        return self.maker.penalty() * super().loss_of_maker(x)


class PenaltyAlone(Penalised):
    """What is toggled is what the optimizers hold, by hand."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        held = self.optimizers()
        for optimizer in held:  # type: ignore[union-attr]
            for each in held:  # type: ignore[union-attr]
                for parameter in parameters_of(each):
                    parameter.requires_grad_(each is optimizer)
            for each in held:  # type: ignore[union-attr]
                each.zero_grad()
            self.manual_backward(self.maker.penalty() * self.critic.penalty() + self.loss_of_maker(batch[0]))
            assert all(each.grad is None for other in held if other is not optimizer for each in parameters_of(other))
            optimizer.step()


class SteppedBetween(Adversarial):
    """What is read of weights after a step of the optimizer is new, also where all of it must be gathered."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        maker, critic = self.optimizers()  # type: ignore[misc,union-attr]
        for optimizer in (maker, critic, maker):
            maker.zero_grad()
            critic.zero_grad()
            self.manual_backward(self.loss_of_maker(batch[0]) * self.norm())
            optimizer.step()

    def norm(self) -> Tensor:
        layer: Any = self.maker.layers[0]
        held = (layer.up_proj.weight, layer.down_proj.weight, layer.routed.experts.up[1], self.maker.head.weight)
        return sum((torch.linalg.matrix_norm(each, 2) for each in held), torch.zeros(()))


class FrozenAfterUse(Adversarial):
    """Gradients do not come to what is frozen when backward runs, as on one device."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        maker, critic = self.optimizers()  # type: ignore[misc,union-attr]
        maker.zero_grad()
        critic.zero_grad()
        loss = self.loss_of_critic(batch[0])
        for parameter in parameters_of(maker):
            parameter.requires_grad = False
        self.manual_backward(loss)
        for parameter in parameters_of(maker):
            parameter.requires_grad = True
        critic.step()
        maker.step()


def parameters_of(optimizer: Any) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def trained(strategy: Any, model: type[LightningModule], batch_size: int) -> dict[str, Tensor]:
    module, generator = model(), torch.Generator().manual_seed(1)
    x = torch.randn(12, LENGTH, WIDTH, generator=generator)
    run = trainer(made(strategy), max_epochs=2, limit_val_batches=0, precision="64-true")
    run.fit(module, DataLoader(TensorDataset(x), batch_size))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def compare(model: type[LightningModule], layout: tuple[int, int, Any]) -> None:
    ranks, readers, strategy = layout
    one, many = (None, model, 4), (strategy, model, 4 // readers)
    assert_like_one_device(trained, ranks, one, many, rtol=1e-9, atol=1e-11)


@sampled(
    1,
    ("model", "layout"),
    [
        (Penalised, "zero 3"),
        (SteppedBetween, "tensor x zero 3"),
        (FrozenAfterUse, "zero 2"),
        (Adversarial, "zero 1"),
        (PenaltyAlone, "tensor parallel, sequence whole"),
        (Adversarial, "tensor parallel"),
        (PenaltyAlone, "expert x data parallel"),
        (Penalised, "expert x zero 3"),
        (SteppedBetween, "expert x tensor"),
        (FrozenAfterUse, "tensor x data parallel"),
        (SteppedBetween, "zero 3"),
        (PenaltyAlone, "expert x zero 2"),
        (Adversarial, "context x zero 3"),
        (FrozenAfterUse, "zero 2, offloaded"),
        (FrozenAfterUse, "zero 3"),
    ],
)
def test_toggled_parameters_train_as_on_one_device(model: type[LightningModule], layout: str) -> None:
    compare(model, LAYOUTS[layout])


class InTurns(LightningModule):
    """Each batch trains every other layer, and one of them from the third batch on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[1].requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            layer.requires_grad_((number % 2 == batch_idx % 2) if number != 1 else batch_idx > 1)
        x = batch[0].mean(1)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def trained_in_turns(strategy: Any, batch_size: int) -> dict[str, Tensor]:
    module = InTurns().double()
    data = torch.randn(32, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer(made(strategy), max_epochs=2, limit_val_batches=0).fit(module, DataLoader(TensorDataset(data), batch_size))
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@sampled(1, "layout", ["tensor parallel", "zero 2", "zero 3"])
def test_layers_that_learn_in_turns_train_as_on_one_device(layout: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    one, many = (None, 8), (strategy, 8 // readers)
    assert_like_one_device(trained_in_turns, ranks, one, many, rtol=1e-8, atol=1e-10)
