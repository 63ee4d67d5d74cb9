"""One batch like those to come, and one step on it that leaves no trace: what techniques may look at before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module
from torchmetrics import Metric, MetricCollection

from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.strategies.data.first_batches import HOST, first_batch, of_rank_zero, untouched
from lightning_parallel.strategies.lightning_package import (
    DummyLogger,
    LightningModule,
    MisconfigurationException,
    Trainer,
    TrainerFn,
    is_param_in_hook_signature,
)
from lightning_parallel.strategies.logged.kept.values import KeptValues
from lightning_parallel.strategies.logged.step_values import options_of
from lightning_parallel.strategies.ranks.agreement import together
from lightning_parallel.strategies.trainer import lightnings
from lightning_parallel.techniques.division import Sample
from lightning_parallel.techniques.pipeline_parallel.rng import own_generators
from lightning_parallel.techniques.pipeline_parallel.trace import UnsupportedStepError
from lightning_parallel.values import tensors_of


def take_sample(trainer: Trainer, mesh: ParallelMesh, host: dist.ProcessGroup) -> Sample:
    """A step of what the trainer is about to do, on a batch that is read ahead. Collective over all ranks.

    Args:
        trainer: whose loaders are looked at.
        mesh: gives the step the world that user code sees.
        host: all ranks.

    Raises:
        TypeError: a loader that can be read only once.
        RuntimeError: another rank could not make its loaders, or read a batch.
    """
    loop, name = _loop_and_step(trainer)
    with (
        lightnings.loaders_made_together(loop, host),
        _loaders(trainer, loop) as combined,
        untouched(combined.flattened, trainer),
    ):
        batch = together(partial(first_batch, trainer, combined), "read a first batch", host)
    step = getattr(trainer.lightning_module, name)
    numbers = [*([0] if takes_index(step) else []), *([0] if _names_loader(combined) else [])]
    return _sample(trainer, mesh, name, batch, numbers)


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
        with untouched([], trainer), without_traces(module), trainer.precision_plugin.forward_context():
            return mesh.as_user(step)(on, *numbers)

    return Sample(run, batch, HOST, partial(parts_unchanged, module))


@contextmanager
def _loaders(trainer: Trainer, loop: Any) -> Iterator[Any]:
    """The loop's loaders. The loop makes them again when its time comes, from where the generators stand then."""
    made_before = lightnings.combined_of(loop) is not None
    with untouched(lightnings.given_loaders(loop), trainer):
        loop.setup_data()
        combined = lightnings.combined_of(loop)
        if combined is None:
            raise ValueError(
                "a pipeline analyzes a step on one batch before the run, but the trainer's limits leave none to read"
            )
        yield combined
    if not made_before:
        lightnings.forget_loaders(loop)


def takes_index(step: Callable[..., Any]) -> bool:
    """Whether Lightning gives the step the batch's index, whatever the step calls it."""
    return is_param_in_hook_signature(step, "batch_idx", min_args=2)


def _names_loader(combined: Any) -> bool:
    """Whether Lightning gives a step the loader's index: it does where loaders are read one after the other."""
    return lightnings.reads_in_turn(combined) and len(combined.flattened) > 1


def _loop_and_step(trainer: Trainer) -> tuple[Any, str]:
    choices: dict[TrainerFn, tuple[Any, str]] = {
        TrainerFn.FITTING: (trainer.fit_loop, "training_step"),
        TrainerFn.VALIDATING: (trainer.validate_loop, "validation_step"),
        TrainerFn.TESTING: (trainer.test_loop, "test_step"),
        TrainerFn.PREDICTING: (trainer.predict_loop, "predict_step"),
    }
    assert trainer.state.fn is not None
    return choices[trainer.state.fn]


# ---------------------------------------------------------------- a step


HOOKS = [name for name, table in vars(Module()).items() if "hook" in name and isinstance(table, dict)]
"""The attributes of modules that have their hooks."""


@contextmanager
def parts_unchanged(module: LightningModule) -> Iterator[None]:
    """Afterwards the module's parts keep in their attributes what they kept before, and have the hooks they had."""
    kept = [KeptValues(part) for part in module.modules() if part is not module]
    tables = [part[name] for part in map(vars, module.modules()) for name in HOOKS if name in part]
    hooks = [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for values in kept:
            values.undo()
        _put_back(hooks)  # a library that installs its own at the first call notes that in an attribute


def _put_back(tables: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for table, before in tables:
        table.clear()
        table.update(before)


def _tables_of_optimizers(trainer: Trainer) -> list[dict[str, Any]]:
    """The groups of optimizers and the attributes of schedulers: a step may set a learning rate."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return [*groups, *(vars(config.scheduler) for config in trainer.lr_scheduler_configs)]


@contextmanager
def without_traces(module: LightningModule, reads: bool = True) -> Iterator[None]:
    """Inside, nothing is logged and no metric counts; afterwards module, optimizers and schedulers are as they were.

    Args:
        module: the user's.
        reads: whether what is logged or counted is looked at, so that it is known to be used.
    """
    kept, generators = KeptValues(module), [(each, each.get_state()) for each in own_generators(module)]
    silent: dict[str, Any] = {"update": _read if reads else _zero, "forward": _read_and_zero if reads else _zero}
    silent["compute"] = _zero
    metrics = [part for part in module.modules() if isinstance(part, (Metric, MetricCollection))]
    given = [
        silent if isinstance(metric, Metric) else {"update": silent["update"]} for metric in metrics
    ]  # it asks for states
    before = [{name: vars(metric).get(name) for name in names} for metric, names in zip(metrics, given, strict=True)]
    settings = [(table, dict(table)) for table in _tables_of_optimizers(module.trainer)]
    logged, loggers = vars(module).get("log"), module.trainer.loggers
    vars(module)["log"] = _read_to_log if reads else _zero
    module.trainer.loggers = [DummyLogger() for _ in loggers]  # for a step that writes to them itself
    for metric, names in zip(metrics, given, strict=True):
        vars(metric).update(names)
    try:
        yield
    finally:
        kept.undo()
        _put_back(settings)
        for generator, state in generators:
            generator.set_state(state)
        module.trainer.loggers = loggers
        vars(module).pop("log")
        if logged is not None:
            vars(module)["log"] = logged
        for metric, own in zip(metrics, before, strict=True):
            for name, value in own.items():
                vars(metric).pop(name)
                if value is not None:
                    vars(metric)[name] = value


def _read(*args: Any, **kwargs: Any) -> None:
    """Looks at values, as what logs or counts them will, so that they are known to be used."""
    for tensor in tensors_of((args, kwargs)):
        torch.equal(tensor, tensor)


def _read_to_log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    try:
        lightnings.require_reduction(name, options_of(args, kwargs))
    except MisconfigurationException as error:
        raise UnsupportedStepError(str(error)) from None
    _read(value)


def _read_and_zero(*args: Any, **kwargs: Any) -> torch.Tensor:
    _read(*args, **kwargs)
    return torch.zeros(())


def _zero(*_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(())
