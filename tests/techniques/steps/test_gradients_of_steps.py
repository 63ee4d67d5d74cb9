"""Gradients that steps of manual optimization choose, give, change, and step again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.layouts import layouts
from tests.ranks import RanksFailed
from tests.techniques.zero.test_toggled_parameters import Adversarial, compare, parameters_of
from tests.tiers import sampled


class Chosen(Adversarial):
    """Each loss goes to the parameters of one optimizer, though others learn."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        maker, critic = self.optimizers()  # type: ignore[misc,union-attr]
        for optimizer, net, loss in (
            (critic, self.critic, self.loss_of_critic),
            (maker, self.maker, self.loss_of_maker),
        ):
            self.go_back(loss(batch[0]), list(net.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in self.parameters())

    def go_back(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        self.manual_backward(loss, inputs=parameters)


class Given(Chosen):
    """Each parameter is given its gradient, clipped by Lightning, and changed before and in a hook."""

    def go_back(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        if parameters[0] is next(self.critic.parameters()):
            optimizer: Any = self.optimizers()[1]  # type: ignore[index]
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            parameters[0].grad.mul_(3)  # type: ignore[union-attr]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                parameter.grad = parameter.grad / (0.1 + parameter.grad.norm())


class SteppedPlainly(Chosen):
    """The optimizers step past Lightning."""

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return super().optimizers(use_pl_optimizer=False)


class Rewritten(Adversarial):
    """Between backward and two steps of it gradients are read and clipped, and others are put in their place."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            for each in self.optimizers():  # type: ignore[union-attr]
                each.zero_grad()
            self.manual_backward(self.loss_of_critic(batch[0]))
            self.manual_backward(self.loss_of_maker(batch[0]))
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            used = [parameter for parameter in self.parameters() if parameter.grad is not None]
            for number, parameter in enumerate(used):
                if number % 2:
                    parameter.grad = parameter.grad / (1 + parameter.grad.norm())  # type: ignore[operator,union-attr]
                else:
                    parameter.grad.mul_(0.5)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.step()


class OnWeights(Adversarial):
    """Weights are set, replaced for a call, and written; the gradient of one expert is read, which few ranks have."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        _, critic = self.optimizers()  # type: ignore[misc,union-attr]
        layer: Any = self.critic.layers[0]
        nn.init.constant_(layer.up_proj.weight, 0.02)
        parameters = dict(self.critic.named_parameters())
        other = {name: each - torch.full(each.shape, 0.01, dtype=each.dtype) for name, each in parameters.items()}
        critic.zero_grad()
        loss = functional_call(self.critic, other, (batch[0],)).square().mean()
        self.manual_backward(loss + self.loss_of_critic(batch[0]))
        gradient = layer.routed.experts.up.grad
        scale = 0.9 if gradient is None else 1 / (1 + gradient[3].norm())
        critic.step()
        with torch.no_grad():
            for parameter in self.critic.parameters():
                parameter.data.mul_(scale)
                parameter[parameter.abs() < 0.01] = 0
            layer.routed.experts.up.data = layer.routed.experts.up.data * 0.9


class OnViews(Adversarial):
    """Rows of weights are written through views of `data` and of `detach()`, made before and after each other."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        _, critic = self.optimizers()  # type: ignore[misc,union-attr]
        layer: Any = self.critic.layers[0]
        with torch.no_grad():
            for weight in (layer.up_proj.weight, layer.down_proj.weight, layer.routed.experts.up):
                weight.data[0].zero_()
                data, detached = weight.data, weight.detach()
                weight[1].mul_(0.5)
                data.mul_(0.9)
                detached[2].add_(0.1)
                weight.mul_(1.1)
                for row in data:
                    row.div_(1 + row.norm())
                torch.clamp_(detached[..., 0], min=-0.1)
        critic.zero_grad()
        weight = layer.up_proj.weight
        self.manual_backward(self.loss_of_critic(batch[0]) + weight[1:3].square().sum() + weight[0].norm())
        critic.step()


LAYOUTS = layouts(
    *("data parallel", "zero 1", "zero 2", "zero 3", "tensor parallel", "tensor parallel, sequence whole"),
    *("tensor x data parallel", "tensor x zero 2", "tensor x zero 3", "expert x data parallel", "expert x tensor"),
    *("expert x zero 2", "expert x zero 3", "context x zero 3", "context"),
)
MODELS = (Given, OnWeights, OnViews, Rewritten, Chosen, SteppedPlainly)
NAMES = list(LAYOUTS)
ROWS = [(model, NAMES[(5 * k + 3 * turn) % len(NAMES)]) for turn in range(5) for k, model in enumerate(MODELS)]


@sampled(2, ("model", "layout"), ROWS)
def test_gradients_that_steps_change_are_those_of_one_device(model: type[Adversarial], layout: str) -> None:
    if model is OnViews and "tensor" in layout:  # its last write is to what has a gathered view
        with pytest.raises(RanksFailed, match="was changed in place, but a view of its gathered copy exists"):
            compare(model, LAYOUTS[layout])
    else:
        compare(model, LAYOUTS[layout])
