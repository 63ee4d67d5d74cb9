"""Steps that leave no trace, as techniques analyze them and probes measure them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies.attributes import Attributes
from lightning_parallel.strategies.data.randomness import RankRandomness
from lightning_parallel.strategies.lightning_package import (
    DummyLogger,
    LightningModule,
    MisconfigurationException,
    Trainer,
)
from lightning_parallel.techniques.pipeline_parallel.rng import own_generators
from lightning_parallel.techniques.pipeline_parallel.trace import UnsupportedStepError
from lightning_parallel.values import tensors_of

HOST = torch.device("cpu")


HOOKS = [name for name, table in vars(nn.Module()).items() if "hook" in name and isinstance(table, dict)]
"""The attributes of modules that have their hooks."""


def _put_back(table: dict[str, Any], before: dict[str, Any]) -> None:
    table.clear()
    table.update(before)


@contextmanager
def untouched(trainer: Trainer, device: torch.device = HOST) -> Iterator[None]:
    """Afterwards random states and the attributes of the module stand where they stood."""
    drawn, kept = RankRandomness.now(device), Attributes(trainer.lightning_module)
    try:
        yield
    finally:
        kept.undo()
        drawn.restore(device)


@contextmanager
def parts_unchanged(module: LightningModule) -> Iterator[None]:
    """Afterwards the module's parts have the attributes and the hooks that they had."""
    kept = [Attributes(part) for part in module.modules() if part is not module]
    hooks = [part[name] for part in map(vars, module.modules()) for name in HOOKS if name in part]
    before = [dict(table) for table in hooks]
    try:
        yield
    finally:
        for snapshot in kept:
            snapshot.undo()
        for table, entries in zip(hooks, before, strict=True):
            _put_back(table, entries)


@contextmanager
def without_traces(module: LightningModule, reads: bool = True) -> Iterator[None]:
    """Inside, nothing is logged and no metric counts; afterwards module, optimizers and schedulers are as they were.

    Args:
        module: the user's.
        reads: whether what is logged or counted is read, so that it is known to be used.
    """
    trainer, kept = module.trainer, Attributes(module)
    read = _read if reads else _zero
    settings: list[dict[str, Any]] = [
        group for optimizer in trainer.optimizers for group in optimizer.param_groups
    ]  # learning rates
    settings += [vars(config.scheduler) for config in trainer.lr_scheduler_configs]
    with ExitStack() as back:
        for table in settings:
            back.callback(_put_back, table, dict(table))
        for generator in own_generators(module):
            back.callback(generator.set_state, generator.get_state())
        back.callback(setattr, trainer, "loggers", trainer.loggers)
        trainer.loggers = [DummyLogger() for _ in trainer.loggers]  # for a step that writes to them itself
        for part in module.modules():
            if isinstance(part, (Metric, MetricCollection)):
                _replace(back, part, {"update": read})
            if isinstance(part, Metric):
                _replace(back, part, {"forward": read, "compute": _zero})
        _replace(back, module, {"log": _read_to_log if reads else _zero})
        back.callback(kept.undo)
        yield


def _replace(back: ExitStack, owner: nn.Module, methods: dict[str, Callable[..., Any]]) -> None:
    back.callback(vars(owner).update, {name: vars(owner)[name] for name in methods if name in vars(owner)})
    for name in methods:
        back.callback(vars(owner).pop, name, None)
    vars(owner).update(methods)


def _read(*args: Any, **kwargs: Any) -> Tensor:
    """Read values, as what logs or counts them will, so that they are known to be used."""
    for tensor in tensors_of((args, kwargs)):
        torch.equal(tensor, tensor)
    return torch.zeros(())


def _read_to_log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    try:
        internals.require_reduction(name, kwargs)
    except MisconfigurationException as error:
        raise UnsupportedStepError(str(error)) from None
    _read(value)


def _zero(*_: Any, **__: Any) -> Tensor:
    return torch.zeros(())
