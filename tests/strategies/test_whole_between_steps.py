"""Helpers, loggers and averages of weights see between steps what one process has, wherever parameters are sharded."""

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_parallel import HybridStrategy, TensorParallel, TensorParallelStrategy, Zero, ZeroStrategy
from lightning_parallel.techniques.tools import global_shard
from lightning_parallel.techniques.tools.global_shard import GlobalShard
from tests.models import Plain, loaders
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import made, require_like
from tests.trainers import trainer

LAYOUTS: dict[str, tuple[int, int, Any]] = {
    "zero 1": (2, 2, partial(ZeroStrategy, stage=1)),
    "zero 2": (2, 2, partial(ZeroStrategy, stage=2)),
    "zero 3": (2, 2, partial(ZeroStrategy, stage=3)),
    "tensor parallel": (2, 1, partial(TensorParallelStrategy, 2)),
    "zero 3 over tensor parallel": (4, 2, lambda: HybridStrategy(Zero(2, stage=3), TensorParallel(2))),
}


class Probe:
    """A helper of the user's, as logging utilities are written."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def norms(self) -> list[float]:
        return [float(parameter.detach().pow(2).sum()) for parameter in self.module.parameters()]

    def histograms(self) -> list[Tensor]:
        """What a logger such as wandb's computes of parameters and gradients."""
        found = [p.detach() for p in self.module.parameters()]
        found += [p.grad for p in self.module.parameters() if p.grad is not None]
        return [torch.histc(each.flatten().cpu().float(), 4) for each in found]


class ByHand:
    """An average of weights as users write it."""

    def __init__(self, module: nn.Module) -> None:
        self.shadow = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self.shadow[name].mul_(0.9).add_(parameter, alpha=0.1)


class Watching(Callback):
    """Keeps what the helpers find in each hook."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_fit_start(self, run: Any, module: Any) -> None:
        self.probe, self.by_hand = Probe(module), ByHand(module)
        self.average = AveragedModel(module.blocks, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_after_backward(self, run: Any, module: Any) -> None:
        self.found.append(list(grad_norm(module, 2).values()))

    def on_before_optimizer_step(self, run: Any, module: Any, optimizer: Any) -> None:
        self.found += [self.probe.histograms(), float(nn.utils.get_total_norm([p.grad for p in module.parameters()]))]
        weight = module.blocks[0].up.weight
        weight.grad[0].zero_()  # through a view
        weight.grad.mul_(0.5)
        module.blocks[1].up.bias.grad = torch.full(module.blocks[1].up.bias.shape, 0.01)
        optimizer.param_groups[0]["params"][-1].grad.clamp_(-0.01, 0.01)

    def on_train_batch_end(self, run: Any, module: Any, *_: Any) -> None:
        self.by_hand.update(module)
        self.average.update_parameters(module.blocks)
        self.found += [self.probe.norms(), [float(shadow.sum()) for shadow in self.by_hand.shadow.values()]]
        inputs = torch.ones(2, module.blocks[0].up.in_features)
        with torch.no_grad():
            self.found += [
                self.average.module[0](inputs),
                module.blocks[1](inputs),
                copy.deepcopy(module.blocks)[0](inputs),
            ]
            module.blocks[0].down.weight[0] *= 0.9
            module.blocks[1].down.weight.clamp_(-0.3, 0.3)
            full = getattr(run.strategy, "full_parameters", lambda *_, **__: nullcontext())
            with full(module.blocks[0], gradients=True, writable=True):
                weight = module.blocks[0].down.weight
                assert type(weight) is nn.Parameter
                assert type(weight.grad) is Tensor
                weight[1] *= 0.9
                self.found.append(weight.grad.norm())


def watched(strategy: Any, batch_size: int, **options: Any) -> Any:
    torch.manual_seed(0)
    module = Plain(partial(torch.optim.AdamW, lr=0.05), blocks=2)
    watching = Watching()
    data = loaders("plain", batch_size, samples=24, val_samples=8, shuffle=False)
    trainer(made(strategy), callbacks=[watching], max_epochs=1, **options).fit(module, *data)
    return watching.found, {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_helpers_find_what_one_process_has(layout: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    begun = begun_on_one(watched, None, 8)
    for found in run_on_ranks(ranks, watched, strategy, 8 // readers):
        require_like(begun.result(), found)


class Counting(Callback):
    """Reads a number of the configuration, as counters of operations do."""

    def on_train_batch_end(self, run: Any, module: Any, *_: Any) -> None:
        self.width = module.blocks[0].up.in_features
        self.log("params", 1.0)
        assert type(module.blocks[0].up.weight) is GlobalShard


def gathers() -> int:
    with mock.patch.object(global_shard, "whole_tensor", wraps=global_shard.whole_tensor) as gather:
        module = Plain(partial(torch.optim.AdamW, lr=0.05), blocks=2)
        data = loaders("plain", 4, samples=24, val_samples=8, shuffle=False)
        trainer(ZeroStrategy(stage=3), callbacks=[Counting()], max_epochs=1).fit(module, *data)
        return gather.call_count


def test_hooks_that_read_no_values_gather_nothing() -> None:
    assert run_on_ranks(2, gathers) == [0, 0]
