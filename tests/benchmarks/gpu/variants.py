"""The ways to train that are compared: a loop by hand, Lightning's single device, and this project's techniques."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel import ActivationCheckpoint, Compile, HybridStrategy
from recipes.gpt import GPTModule, warmup_cosine
from tests.benchmarks.gpu.setting import Device, Job


@dataclass(frozen=True)
class Setting:
    """What all variants share."""

    job: Job
    device: Device
    backend: str  # of torch.compile

    @property
    def steps(self) -> int:
        return self.job.warm_up + self.job.steps


@dataclass(frozen=True)
class Measured:
    """A fit: seconds a step, and the peak of its memory in bytes."""

    seconds: float
    peak: int | None


class Watch(Callback):
    """From the end of the warm-up to the end of the last step, with the device idle at both."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self._start = setting, 0.0
        self.measured = Measured(0.0, None)

    def after(self, steps: int) -> None:
        """So many steps are done."""
        device, job = self._setting.device, self._setting.job
        if steps == job.warm_up:
            device.finish(forget_peak=True)
            self._start = time.perf_counter()
        if steps == self._setting.steps:
            device.finish()
            self.measured = Measured((time.perf_counter() - self._start) / job.steps, device.peak())

    def on_train_batch_end(self, *rest: Any) -> None:
        self.after(rest[-1] + 1)


Variant = Callable[[Setting], Measured]


class Recomputed(nn.Module):
    """A block whose activations are computed again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Tensor:
        return checkpoint(self.block, *args, use_reentrant=False)


def prepare(module: GPTModule, backend: str) -> None:
    """What the two techniques do, as a user writes it."""
    assert module.network is not None
    for number, block in enumerate(module.network.blocks):
        module.network.blocks[number] = Recomputed(block)
        module.network.blocks[number].compile(backend=backend)


def by_hand(setting: Setting) -> Measured:
    """Forward, backward, AdamW and its schedule, and nothing else."""
    device, module = setting.device.torch, setting.job.module()
    with device:
        module.configure_model()
    module.to(torch.bfloat16)
    prepare(module, setting.backend)
    optimizer = torch.optim.AdamW(module.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, 1000, 10_000, 0.1))
    watch = Watch(setting)
    for step, batch in enumerate(setting.job.batches(setting.steps, setting.device)):
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        loss = module._loss(moved)[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        watch.after(step + 1)
    return watch.measured


class Prepared(GPTModule):
    """The recipe's module, with its blocks compiled and recomputed by hand."""

    backend = "inductor"

    def configure_model(self) -> None:
        if self.network is None:
            super().configure_model()
            prepare(self, self.backend)


def fit(setting: Setting, module: GPTModule, strategy: Any) -> Measured:
    watch, data = Watch(setting), setting.job.batches(setting.steps, setting.device)
    options: dict[str, Any] = {"precision": "bf16-true", "barebones": True, "max_epochs": 1, "callbacks": [watch]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(accelerator=setting.device.kind, devices=1, strategy=strategy, **options).fit(module, data)
    return watch.measured


def lightning(setting: Setting) -> Measured:
    module = setting.job.module(Prepared)
    module.backend = setting.backend
    return fit(setting, module, "auto")


def ours(*techniques: Any, chunked: bool = False, compiled: bool = True) -> Variant:
    """A `HybridStrategy` with these techniques, and `Compile`."""

    def run(setting: Setting) -> Measured:
        module = setting.job.module(loss_chunks=setting.job.chunks if chunked else 1)
        added = (Compile(backend=setting.backend),) if compiled else ()
        return fit(setting, module, HybridStrategy(*techniques, *added))

    return run


BASE, LIGHTNING = "by hand", "Lightning, single device"
RECIPE = "Compile, ActivationCheckpoint"
VARIANTS: dict[str, Variant] = {
    BASE: by_hand,
    "by hand again (A/A)": by_hand,
    LIGHTNING: lightning,
    RECIPE: ours(ActivationCheckpoint()),
    "selective": ours(ActivationCheckpoint(mode="selective")),
    "loss in chunks": ours(ActivationCheckpoint(), chunked=True),
    "not compiled": ours(ActivationCheckpoint(), compiled=False),
}
