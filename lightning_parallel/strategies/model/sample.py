"""One batch like those to come, and one step on it that leaves no trace: what techniques may analyze before a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.strategies.attributes import Attributes
from lightning_parallel.strategies.data.batches import Batches
from lightning_parallel.strategies.data.first_batch import FirstPass, of_rank_zero
from lightning_parallel.strategies.data.randomness import RankRandomness
from lightning_parallel.strategies.lightning_package import (
    DummyLogger,
    LightningModule,
    MisconfigurationException,
    Trainer,
    TrainerFn,
    is_param_in_hook_signature,
)
from lightning_parallel.strategies.trainer import lightnings
from lightning_parallel.techniques.division import Sample
from lightning_parallel.techniques.pipeline_parallel.rng import own_generators
from lightning_parallel.techniques.pipeline_parallel.trace import UnsupportedStepError
from lightning_parallel.values import map_tensors, tensors_of

HOST = torch.device("cpu")


def take_sample(trainer: Trainer, mesh: ParallelMesh, host: dist.ProcessGroup, batches: Batches) -> Sample:
    """A step of what the trainer is about to do, on the first batch, which the loop gets later. Collective.

    Args:
        trainer: whose loaders are read.
        mesh: gives the step the world that user code sees.
        host: all ranks.
        batches: gets the pass that the batch begins.

    Raises:
        RuntimeError: another rank could not make its loaders, or read a batch.
    """
    loops: dict[TrainerFn, tuple[Any, str]] = {
        TrainerFn.FITTING: (trainer.fit_loop, "training_step"),
        TrainerFn.VALIDATING: (trainer.validate_loop, "validation_step"),
        TrainerFn.TESTING: (trainer.test_loop, "test_step"),
        TrainerFn.PREDICTING: (trainer.predict_loop, "predict_step"),
    }
    assert trainer.state.fn is not None
    loop, name = loops[trainer.state.fn]
    batches.first_pass = FirstPass(loop, batches.share_generators, host)
    batch, combined, module = batches.first_pass.batch, lightnings.combined_of(loop), trainer.lightning_module
    in_turn = combined is not None and lightnings.reads_in_turn(combined) and len(combined.flattened) > 1
    with untouched(trainer):
        batch = trainer.precision_plugin.convert_input(map_tensors(Tensor.clone, batch))
        batch = lightnings.transferred(module, batch, HOST, 0)
    numbers = [0] * (takes_index(getattr(module, name)) + in_turn)
    return _sample(trainer, mesh, name, of_rank_zero(batch, host), numbers)


def sample_of(trainer: Trainer, mesh: ParallelMesh, host: dist.ProcessGroup, name: str, args: Sequence[Any]) -> Sample:
    """The step that the trainer is about to run, on a copy of the batch of rank 0. Collective over all ranks.

    Args:
        trainer: whose module has the step.
        mesh: gives the step the world that user code sees.
        host: all ranks.
        name: of the step.
        args: what Lightning gives it: the batch, on this rank's device, and numbers.
    """
    batch, *numbers = args
    on_host = trainer.lightning_module.transfer_batch_to_device(batch, HOST, 0)
    return _sample(trainer, mesh, name, of_rank_zero(on_host, host), numbers)


def _sample(trainer: Trainer, mesh: ParallelMesh, name: str, batch: Any, numbers: Sequence[int]) -> Sample:
    module, step = trainer.lightning_module, getattr(trainer.lightning_module, name)

    def run(on: Any = batch) -> Any:
        with untouched(trainer), without_traces(module), trainer.precision_plugin.forward_context():
            return mesh.as_user(step)(on, *numbers)

    return Sample(run, batch, HOST, partial(parts_unchanged, module))


def takes_index(step: Callable[..., Any]) -> bool:
    """Whether Lightning gives the step the batch's index, whatever the step calls it."""
    return is_param_in_hook_signature(step, "batch_idx", min_args=2)


# ---------------------------------------------------------------- steps without traces


HOOKS = [name for name, table in vars(nn.Module()).items() if "hook" in name and isinstance(table, dict)]
"""The attributes of modules that have their hooks."""


def _put_back_entries(table: Any, before: Any) -> None:
    table.clear()
    table.extend(before) if isinstance(table, (list, deque)) else table.update(before)


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
            _put_back_entries(table, entries)


@contextmanager
def without_traces(module: LightningModule, reads: bool = True) -> Iterator[None]:
    """Inside, nothing is logged and no metric counts; afterwards module, optimizers and schedulers are as they were.

    Args:
        module: the user's.
        reads: whether what is logged or counted is read, so that it is known to be used.
    """
    trainer, kept = module.trainer, Attributes(module)
    read = _read if reads else _zero
    settings = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]  # learning rates
    settings += [vars(config.scheduler) for config in trainer.lr_scheduler_configs]
    with ExitStack() as back:
        for table in settings:
            back.callback(_put_back_entries, table, dict(table))
        for generator in own_generators(module):
            back.callback(generator.set_state, generator.get_state())
        back.callback(setattr, trainer, "loggers", trainer.loggers)
        trainer.loggers = [DummyLogger() for _ in trainer.loggers]  # for a step that writes to them itself
        for part in module.modules():
            if isinstance(part, (Metric, MetricCollection)):
                names = ("update", "forward", "compute") if isinstance(part, Metric) else ("update",)
                back.enter_context(_replaced(part, {name: _zero if name == "compute" else read for name in names}))
        back.enter_context(_replaced(module, {"log": _read_to_log if reads else _zero}))
        back.callback(kept.undo)
        yield


@contextmanager
def _replaced(owner: Any, methods: dict[str, Callable[..., Any]]) -> Iterator[None]:
    before = {name: vars(owner)[name] for name in methods if name in vars(owner)}
    vars(owner).update(methods)
    try:
        yield
    finally:
        for name in methods:
            vars(owner).pop(name, None)
        vars(owner).update(before)


def _read(*args: Any, **kwargs: Any) -> Tensor:
    """Read values, as what logs or counts them will, so that they are known to be used."""
    for tensor in tensors_of((args, kwargs)):
        torch.equal(tensor, tensor)
    return torch.zeros(())


def _read_to_log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    try:
        lightnings.require_reduction(name, kwargs)
    except MisconfigurationException as error:
        raise UnsupportedStepError(str(error)) from None
    _read(value)


def _zero(*_: Any, **__: Any) -> Tensor:
    return torch.zeros(())
