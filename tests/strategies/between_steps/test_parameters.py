"""Helpers, loggers, averages and clipping use parameters and gradients between steps as on one device.

One fit has all of them at once: reads, writes and replacements meet each other, wherever parameters are.
"""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from tests.layouts import layouts
from tests.models import TiedWords
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.tiers import sampled
from tests.trainers import trainer

LAYOUTS = layouts(
    *("tensor x zero 3", "zero 1", "zero 3", "tensor parallel", "zero 2"),
    *("pipeline", "pipeline x zero 1", "pipeline x tensor", "pipeline x zero 3"),
)


class Seeing(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []


class Helper(Seeing):
    """A helper object made before the model is divided, which reads parameters that it keeps, and their gradients."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.norm = lambda: sum(float(p.detach().pow(2).sum()) for p in module.parameters()) ** 0.5

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.kept = [*module.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append([self.norm(), sum(p.numel() for p in self.kept), self.kept[0].detach().flatten()[:2].tolist()])
        self.seen.append([None if p.grad is None else float(p.grad.norm()) for p in self.kept])


class ByHand(Seeing):
    """An average of weights, kept by names, which takes the place of the weights at the end of an epoch."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.average = {name: p.detach().clone() for name, p in module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, p in module.named_parameters():
            self.average[name].mul_(0.5).add_(p, alpha=0.5)
        self.seen.append([float(value.norm()) for value in self.average.values()])

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        for name, p in module.named_parameters():
            p.copy_(self.average[name])


class Averaged(Seeing):
    """`AveragedModel` by one function for each weight and for all at once, its forward, and that of a copy."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.averages = [
            AveragedModel(copy.deepcopy(module.layers), avg_fn=get_ema_avg_fn(0.5)),
            AveragedModel(module.layers, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        ]

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for average in self.averages:
            average.update_parameters(module.layers)

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        for layers in (*(average.module for average in self.averages), module.layers, copy.deepcopy(module.layers)):
            x = torch.linspace(-1, 1, 8, dtype=torch.float64)
            for layer in layers:
                x = layer(x)
            self.seen.append([x, [p.detach().norm() for p in layers.parameters()]])


class Watching(Seeing):
    """What `wandb.watch` does, histograms of weights and gradients; Lightning's `grad_norm`, and clipping by hand."""

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.seen.append(grad_norm(module, 2))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        for each in (*gradients, *module.parameters()):
            flat = each.detach().cpu().flatten()
            self.seen.append([torch.histc(flat, 8, -1, 1), float(flat.min()), each.abs().max().item()])
        total = nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        self.seen.append([grad_norm(module, 2), float(total), float(nn.utils.get_total_norm(gradients))])


class Writing(Seeing):
    """Clamps, freezes, draws noise, calls the module, and writes to `strategy.full_parameters`."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for p in module.parameters():
                p.clamp_(-0.4, 0.4)
            module.layers[1].up.weight[0].zero_()
            module.layers[0].down.weight.data *= 0.9
            nn.init.normal_(module.layers[1].norm.bias, std=0.01)
            self.seen.append(module(torch.arange(6)[None]))
        module.layers[0].norm.requires_grad_(batch_idx % 2 == 1)
        self.seen.append([p.requires_grad for p in module.parameters()])
        full = getattr(trainer.strategy, "full_parameters", lambda *_, **__: nullcontext())
        with torch.no_grad(), full(module.layers[0], gradients=True, writable=True):
            weight = module.layers[0].down.weight
            assert type(weight) is nn.Parameter
            assert type(weight.grad) is Tensor
            weight[1] *= 0.9
            self.seen.append(weight.grad.norm())


pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
KINDS = (Helper, ByHand, Averaged, Watching, Writing)


def watched(strategy: Any, readers: int) -> Any:
    random, module, callbacks = torch.Generator().manual_seed(1), TiedWords(blocks=2), [kind() for kind in KINDS]
    data = TensorDataset(*(torch.randint(19, (16, 6), generator=random) for _ in range(2)))
    run = trainer(made(strategy), callbacks=callbacks, precision="64-true", max_epochs=2)
    torch.manual_seed(7)
    run.fit(module, DataLoader(data, 8 // readers))
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in module.parameters())
    seen = {type(each).__name__: plain(each.seen) for each in callbacks}
    return seen, {name: value.clone() for name, value in module.state_dict().items()}


def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return torch.as_tensor(value).detach().double().clone() if isinstance(value, (Tensor, float)) else value


@sampled(3, "layout", LAYOUTS)
def test_parameters_between_steps(layout: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    assert_like_one_device(watched, ranks, (None, 1), (strategy, readers))
