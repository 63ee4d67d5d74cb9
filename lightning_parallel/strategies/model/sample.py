"""One batch like those to come, and one step on it that leaves no trace: what techniques may look at before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import Metric, MetricCollection

from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.strategies.data.batches import length_of
from lightning_parallel.strategies.data.first_batches import HOST, first_batch, of_rank_zero, untouched
from lightning_parallel.strategies.data.layouts import Layouts
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
from lightning_parallel.strategies.ranks.agreement import gather_objects, together
from lightning_parallel.strategies.trainer import lightnings
from lightning_parallel.techniques.division import Sample
from lightning_parallel.techniques.observed.draws import own_generators
from lightning_parallel.techniques.observed.recorder import Unexpected
from lightning_parallel.values import tensors_of

PACKAGE = "lightning_parallel."


def take_sample(trainer: Trainer, mesh: ParallelMesh, host: dist.ProcessGroup, layouts: Layouts | None) -> Sample:
    """A sample step of what the trainer is about to do, on the host. All ranks must call.

    Args:
        trainer: whose loaders are looked at.
        mesh: gives the step the world that user code sees.
        host: all ranks.
        layouts: takes where samples are in its batch; none if nobody divides batches by their samples.

    Raises:
        TypeError: a loader that can be read only once.
        RuntimeError: another rank could not make its loaders, or read a batch.
    """
    module: Any = trainer.lightning_module
    loop, step = _loop_and_step(trainer, module)
    with (
        lightnings.loaders_made_together(loop, host),
        _loaders(trainer, loop, host) as (combined, ahead),
        untouched(combined.flattened, trainer),
    ):
        read = partial(first_batch, trainer, combined, ahead, layouts is not None)
        batch, layout = together(read, "read a first batch", host)
        if ahead:  # each reader has its own part of a stream
            batch, layout = of_rank_zero(batch, layout, host)
        layout = None if layouts is None else layouts.agree(combined, 0, layout)
    numbers = [*([0] if _takes_index(step) else []), *([0] if _names_loader(combined) else [])]

    def run(on: Any = batch) -> Any:
        with untouched([], trainer), _without_traces(module), trainer.precision_plugin.forward_context():
            return mesh.as_user(step)(on, *numbers)

    return Sample(run, batch, HOST, layout, partial(_parts_unchanged, module))


@contextmanager
def _loaders(trainer: Trainer, loop: Any, host: dist.ProcessGroup) -> Iterator[tuple[Any, list[Any]]]:
    """The loop's loaders, and what has been read of them for the run.

    The loop makes them again when its time comes, from where the generators then stand, if it would anyway, if the
    model is yet to be built, or if hooks run until then, which may draw or seed: on one device they do before the
    loaders. So it does if they begin a stream of which Lightning reads nothing ahead: the look goes on in it.
    """
    fitting, module = trainer.state.fn == TrainerFn.FITTING, trainer.lightning_module
    theirs = [each for each in lightnings.callbacks_of(trainer) if not type(each).__module__.startswith(PACKAGE)]
    hooks = any(gather_objects(lightnings.somebody_overrides(("on_fit_start",), module, theirs), host))
    given = lightnings.given_loaders(loop)
    again = not fitting or hooks or any(parameter.is_meta for parameter in module.parameters())
    again = again or any(map(_begins_unread, given))
    with untouched(given, trainer) if again else nullcontext():
        loop.setup_data()
        combined = lightnings.combined_of(loop)
        if combined is None:
            raise ValueError(
                "a pipeline looks at one batch before the run, but the trainer's limits leave none to read"
            )
        yield combined, [] if again else lightnings.read_ahead(loop)
    if again:
        lightnings.forget_loaders(loop)


def _begins_unread(loader: Any) -> bool:
    is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    return is_stream and length_of(loader) is not None


def _takes_index(step: Callable[..., Any]) -> bool:
    """Whether Lightning gives the step the batch's index, whatever the step calls it."""
    return is_param_in_hook_signature(step, "batch_idx", min_args=2)


def _names_loader(combined: Any) -> bool:
    """Whether Lightning gives a step the loader's index: it does where loaders are read one after the other."""
    return lightnings.reads_in_turn(combined) and len(combined.flattened) > 1


def _loop_and_step(trainer: Trainer, module: LightningModule) -> tuple[Any, Callable[..., Any]]:
    choices: dict[TrainerFn, tuple[Any, Callable[..., Any]]] = {
        TrainerFn.FITTING: (trainer.fit_loop, module.training_step),
        TrainerFn.VALIDATING: (trainer.validate_loop, module.validation_step),
        TrainerFn.TESTING: (trainer.test_loop, module.test_step),
        TrainerFn.PREDICTING: (trainer.predict_loop, module.predict_step),
    }
    assert trainer.state.fn is not None
    return choices[trainer.state.fn]


# ---------------------------------------------------------------- a step


HOOKS = [name for name, table in vars(Module()).items() if "hook" in name and isinstance(table, dict)]
"""The attributes of modules that have their hooks."""


@contextmanager
def _parts_unchanged(module: LightningModule) -> Iterator[None]:
    kept = [KeptValues(part) for part in module.modules() if part is not module]
    tables = [part[name] for part in map(vars, module.modules()) for name in HOOKS if name in part]
    hooks = [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for values in kept:
            values.undo()
        for table, before in hooks:  # a library that installs its own at the first call notes that in an attribute
            table.clear()
            table.update(before)


@contextmanager
def _without_traces(module: LightningModule) -> Iterator[None]:
    """Inside, nothing is logged and no metric counts; afterwards the module keeps what it kept."""
    kept, generators = KeptValues(module), [(each, each.get_state()) for each in own_generators(module)]
    silent: dict[str, Any] = {"update": _read, "forward": _read_and_zero, "compute": _zero}
    metrics = [part for part in module.modules() if isinstance(part, (Metric, MetricCollection))]
    given = [silent if isinstance(metric, Metric) else {"update": _read} for metric in metrics]  # it asks for states
    before = [{name: vars(metric).get(name) for name in names} for metric, names in zip(metrics, given, strict=True)]
    logged, loggers = vars(module).get("log"), module.trainer.loggers
    vars(module)["log"] = _read_to_log
    module.trainer.loggers = [DummyLogger() for _ in loggers]  # for a step that writes to them itself
    for metric, names in zip(metrics, given, strict=True):
        vars(metric).update(names)
    try:
        yield
    finally:
        kept.undo()
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
        raise Unexpected(str(error)) from None
    _read(value)


def _read_and_zero(*args: Any, **kwargs: Any) -> torch.Tensor:
    _read(*args, **kwargs)
    return torch.zeros(())


def _zero(*_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(())
