"""Helpers, loggers, averages and clipping use parameters and gradients between steps as on one device.

One fit has all of them at once: reads, writes and replacements meet each other, wherever parameters are.
"""

import copy
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    ZeroStrategy,
)
from lightning_parallel.techniques.tools import global_shard
from lightning_parallel.techniques.tools.global_shard import GlobalShard
from tests.layouts import layouts
from tests.models import TiedWords
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.trainers import trainer

LAYOUTS = layouts(
    *("zero 1", "zero 2", "zero 3", "tensor parallel", "tensor x zero 3"),
    *("pipeline", "pipeline x zero 1", "pipeline x zero 3", "pipeline x tensor"),
)


class Seeing(Callback):
    """Notes what it sees."""

    def __init__(self) -> None:
        self.seen: list[Any] = []


class Helper(Seeing):
    """A helper object made before the model is divided, which reads the module later."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.norm = lambda: sum(float(p.detach().pow(2).sum()) for p in module.parameters()) ** 0.5

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        count = sum(p.numel() for p in module.parameters())
        self.seen.append([self.norm(), count, next(module.parameters()).detach().flatten()[:2].tolist()])


class Keeping(Seeing):
    """Keeps parameters in a list of its own, and reads their gradients when the step is over."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.kept = [*module.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
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
    """What `wandb.watch` does: histograms of weights and of gradients."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for name, p in module.named_parameters():
            gradient, flat = p.grad, p.detach().cpu().flatten()
            self.seen.append([len(name), torch.histc(flat, 8, -1, 1), float(flat.min()), gradient is None])
            if gradient is not None:
                self.seen.append([torch.histc(gradient.detach().cpu(), 8, -1, 1), gradient.abs().max().item()])


class Norms(Seeing):
    """Lightning's `grad_norm`, and clipping by hand."""

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.seen.append(grad_norm(module, 2))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        total = nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        self.seen.append([grad_norm(module, 2), float(total), float(nn.utils.get_total_norm(gradients))])


class WritingGradients(Seeing):
    """Writes into gradients, through views of them, and puts others in their place."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        weight, bias = module.layers[0].up.weight, module.layers[1].up.bias
        weight.grad[0].zero_()
        weight.grad.mul_(0.5)
        bias.grad = torch.full(bias.shape, 0.01, dtype=torch.float64)
        optimizer.param_groups[0]["params"][-1].grad.clamp_(-0.01, 0.01)
        for p in module.layers[1].parameters():
            self.write_pieces(p.grad)

    def write_pieces(self, gradient: Tensor) -> None:
        for row in gradient[:2]:
            row.clamp_(-0.01, 0.01)
        gradient.view(-1)[::3].mul_(0.5)
        torch.mul(gradient, 2.0, out=gradient)
        if gradient.dim() > 1:
            gradient.t().mul_(torch.linspace(0.5, 1, len(gradient)))
            gradient.data = gradient.data - gradient.data.mean(1, keepdim=True)
        elif len(gradient) == 12:
            nn.init.constant_(gradient, 0.01)


class Writing(Seeing):
    """Clamps, freezes, draws noise, and calls the module."""

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


class InFull(Seeing):
    """`strategy.full_parameters`, which gives plain tensors and takes back what is written to them."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        full = getattr(trainer.strategy, "full_parameters", lambda *_, **__: nullcontext())
        with torch.no_grad(), full(module.layers[0], gradients=True, writable=True):
            weight = module.layers[0].down.weight
            assert type(weight) is nn.Parameter
            assert type(weight.grad) is Tensor
            weight[1] *= 0.9
            self.seen.append(weight.grad.norm())


pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
KINDS = (Helper, Keeping, ByHand, Averaged, Watching, Norms, WritingGradients, Writing, InFull)


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_between_steps(layout: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    assert_like_one_device(watched, ranks, (None, 1), (strategy, readers))


class Counting(Callback):
    """Reads a number of the configuration, as counters of operations do."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.width = module.layers[0].up.in_features
        self.log("params", 1.0)
        assert type(module.layers[0].up.weight) is GlobalShard


def gathers() -> int:
    data = DataLoader(TensorDataset(*[torch.arange(48).view(8, 6) % 19] * 2), 4)
    with mock.patch.object(global_shard, "whole_tensor", wraps=global_shard.whole_tensor) as gather:
        trainer(ZeroStrategy(stage=3), callbacks=[Counting()], max_epochs=1).fit(TiedWords(blocks=2), data)
        return gather.call_count


def test_hooks_that_read_no_values_gather_nothing() -> None:
    assert run_on_ranks(2, gathers) == [0, 0]
