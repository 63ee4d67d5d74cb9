"""Steps and hooks with an order of their own: critics before generators, reads between forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.strategies.between_steps.chains import WIDTH, Chain, Kind, check
from tests.tiers import sampled


class Adversaries(Chain):
    """The critic is stepped before the generator goes backward, through what it made for both.

    Of the last batch ranks have three and two samples.
    """

    toggles, every, samples = False, 1, 17

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        generator, critic = optimizers
        made = self(batch[0].roll(1, 1))
        if self.toggles:
            self.toggle_optimizer(critic)
        of_critic = F.softplus(-self.critic(batch[0])).mean() + F.softplus(self.critic(made.detach())).mean()
        critic.zero_grad()
        self.manual_backward(of_critic)
        if batch_idx % self.every == 0:
            critic.step()
        if self.toggles:
            self.untoggle_optimizer(critic)
            self.toggle_optimizer(generator)
        loss = F.softplus(-self.critic(made)).mean()
        generator.zero_grad()
        self.manual_backward(loss)
        generator.step()
        if self.toggles:
            self.untoggle_optimizer(generator)
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.layers, self.critic)]


class Toggled(Adversaries):
    toggles, every = True, 2


class Looks(Chain):
    """Averages weights between a forward and its backward, where Lightning has a hook."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            now = [parameter.clone() for parameter in self.layers.parameters()]
            mean = vars(self).get("mean", now)
            self.mean = [0.9 * old + 0.1 * new for old, new in zip(mean, now, strict=True)]
        self.seen.append(sum(float(each.sum()) for each in self.mean))


class Swapping(torch.optim.SGD):
    """Swaps parameters for an average of them in evaluation, as schedule-free optimizers do."""

    @torch.no_grad()
    def eval(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if "average" in self.state[parameter]:
                self.state[parameter]["kept"] = parameter.clone()
                parameter.data.lerp_(end=self.state[parameter]["average"], weight=0.8)

    @torch.no_grad()
    def train(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if "kept" in self.state[parameter]:
                parameter.data.copy_(self.state[parameter].pop("kept"))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("average", parameter.clone()).lerp_(parameter, 0.2)
        return loss


class Turns(Chain):
    """Turns its optimizer to training and evaluation, in hooks of which one looks at the model."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.trainer.optimizers[0].train()

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        self.optimizers().eval()

    def on_train_epoch_end(self) -> None:
        optimizer = self.trainer.optimizers[0]
        for turn in (lambda: None, optimizer.train, optimizer.eval):
            turn()
            self.seen += [float(self.layers[number].up.weight.detach().norm()) for number in (0, 3)]

    def configure_optimizers(self) -> Any:
        optimizer = Swapping(self.parameters(), lr=0.1)
        optimizer.steps_each_parameter = True
        return optimizer


class StepsInHooks(Chain):
    """An optimizer steps once more, by the gradients that are left, in hooks that look at the model."""

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        self.look()
        self.trainer.optimizers[0].step()
        self.look()

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.layers[1].down.weight.mul_(1.1)
        optimizer: Any = self.optimizers()
        optimizer.step()
        self.look()

    def look(self) -> None:
        self.seen += [float(layer.up.weight.detach().norm()) for layer in self.layers]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


KINDS: dict[str, list[Kind]] = {
    "tensor parallel": [Toggled, Looks, Turns, StepsInHooks],
    "zero 3": [Toggled, Looks, StepsInHooks],
    "data parallel": [Adversaries, Toggled, Looks],
    "zero 2": [Adversaries, Turns, StepsInHooks],
    "zero 3, recomputed": [Adversaries],
    "pipeline x data parallel": [Turns],
    "pipeline": [Turns, StepsInHooks],
}


@sampled(2, "layout", KINDS)
def test_steps_in_an_own_order(layout: str) -> None:
    check(KINDS[layout], layout)
