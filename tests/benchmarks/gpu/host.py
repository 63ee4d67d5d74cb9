"""What a strategy takes of the host in a step of a tiny model, at world size 1: time of the thread that runs it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_parallel import (
    ContextParallel,
    DataParallel,
    ExpertParallel,
    HybridStrategy,
    PipelineParallel,
    TensorParallel,
    Zero,
)
from recipes.gpt import GPTConfig, GPTModule
from recipes.moe import MoEConfig, MoEModule
from tests.benchmarks.gpu.device import Device
from tests.benchmarks.gpu.job import Repeated
from tests.benchmarks.interleaved import Cost

TINY = {"vocab_size": 64, "context": 16, "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "hidden_dim": 32}
EXPERTS = {"n_experts": 2, "top_k": 1, "expert_dim": 32}
WARM_UP = 5


def gpt() -> GPTModule:
    return GPTModule(GPTConfig(**TINY))


def mixture() -> GPTModule:
    return MoEModule(MoEConfig(**TINY, **EXPERTS))


@dataclass(frozen=True)
class Way:
    """A strategy, what it trains, and the way with which it is compared."""

    strategy: Callable[[], Any]
    module: Callable[[], GPTModule] = gpt
    base: str = "Lightning, single device"


def of(*techniques: Any) -> Way:
    return Way(partial(HybridStrategy, *techniques))


MIXTURE = "Lightning, mixture of experts"
WAYS: dict[str, Way] = {
    Way.base: Way(lambda: "auto"),
    "the same again (A/A)": Way(lambda: "auto"),
    "HybridStrategy()": of(),
    "DataParallel": of(DataParallel(1)),
    "Zero(stage=1)": of(Zero(1, stage=1)),
    "Zero(stage=2)": of(Zero(1, stage=2)),
    "Zero(stage=3)": of(Zero(1)),
    "TensorParallel": of(TensorParallel(1)),
    "TensorParallel(overlap=True)": of(TensorParallel(1, overlap=True)),
    "PipelineParallel": of(PipelineParallel(1)),
    "ContextParallel": of(ContextParallel(1)),
    MIXTURE: Way(lambda: "auto", mixture, MIXTURE),
    "ExpertParallel": Way(partial(HybridStrategy, ExpertParallel(1)), mixture, MIXTURE),
}


class HostWatch(Callback):
    """The mean cost of the steps after the warm-up."""

    def __init__(self, device: Device, steps: int) -> None:
        self._device, self._steps = device, steps

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP:
            self._device.finish()
            self.start = Cost.now()

    def on_train_batch_end(self, *rest: Any) -> None:
        if rest[-1] == WARM_UP + self._steps - 1:
            self._device.finish()
            self.cost = Cost.now().since(self.start, self._steps)


def cost_of(way: Way, device: Device, steps: int) -> Cost:
    torch.manual_seed(0)
    watch, module = HostWatch(device, steps), way.module()
    data = DataLoader(Repeated(module.config, 2 * (WARM_UP + steps)), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(
            accelerator=device.kind,
            devices=1,
            strategy=way.strategy(),
            barebones=True,
            max_epochs=1,
            callbacks=[watch],
        ).fit(module, data)
    return watch.cost
