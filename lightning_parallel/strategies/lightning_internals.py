"""Access to private fields of Lightning 2.6. Most private fields of loops and loaders are used in this module only.

Functions that change a Lightning or user object register on the `ExitStack` `back` how to undo the change. Loops and
combined loaders are typed `Any` where their classes are private or differ by loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from inspect import unwrap
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils._pytree import tree_unflatten
from torch.utils.data import BatchSampler, DataLoader

from lightning_parallel.mesh import DefaultGroup
from lightning_parallel.strategies.lightning_package import (
    BaseFinetuning,
    Callback,
    CombinedLoader,
    LightningModule,
    Trainer,
)
from lightning_parallel.strategies.ranks.agreement import run_or_raise_on_all


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which an instance attribute of `owner` has another value."""
    attributes = vars(owner)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        attributes.pop(name, None)
        attributes.update(before)


# ---------------------------------------------------------------- a trainer


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the trainer's list of callbacks itself: changes of the list change which callbacks are called."""
    callbacks: list[Callback] = vars(trainer)["callbacks"]
    return callbacks


def disable_data_changes(
    trainer: Trainer, preserved: Callable[[], AbstractContextManager[None]], back: ExitStack
) -> bool:
    """Keep Lightning from replacing samplers, from inference mode, and from drawing random numbers on a skipped pass.

    Args:
        trainer: the trainer of the run.
        preserved: returns a context that restores random states at its end.
        back: gets callbacks that undo the changes.

    Returns:
        Whether Lightning was allowed to replace the user's sampler by its `DistributedSampler`.
    """
    connector = trainer._accelerator_connector
    divides_data = bool(connector.use_distributed_sampler)
    back.callback(setattr, connector, "use_distributed_sampler", divides_data)
    connector.use_distributed_sampler = False
    for loop in evaluation_loops(trainer):
        back.callback(setattr, loop, "inference_mode", loop.inference_mode)
        loop.inference_mode = False  # operations on sharded parameters and inference tensors together fail
    val_loop: Any = trainer.fit_loop.epoch_loop.val_loop
    skip = val_loop.increment_progress_to_evaluation_end

    def skipped() -> None:  # called when a fit counts an evaluation as done without running it
        with preserved():
            skip()

    back.enter_context(replaced(val_loop, "increment_progress_to_evaluation_end", skipped))
    return divides_data


def find_parameters_by_identity(callbacks: Iterable[Callback], back: ExitStack) -> None:
    """Let finetuning callbacks find the parameters of an optimizer by identity, as `filter_on_optimizer` should.

    Lightning compares the values of all pairs of parameters instead, for which ranks would gather every parameter.
    """
    if not any(isinstance(callback, BaseFinetuning) for callback in callbacks):
        return

    def not_in(optimizer: Optimizer, params: Iterable[Any]) -> list[Any]:
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [parameter for parameter in params if id(parameter) not in known]

    back.callback(setattr, BaseFinetuning, "filter_on_optimizer", vars(BaseFinetuning)["filter_on_optimizer"])
    BaseFinetuning.filter_on_optimizer = staticmethod(not_in)  # type: ignore[method-assign]


# ---------------------------------------------------------------- a loop


def evaluation_loops(trainer: Trainer) -> tuple[Any, ...]:
    """Return all evaluation loops; the validation loop of a fit comes first."""
    return trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop


def running_evaluation(trainer: Trainer) -> Any:
    """Return the evaluation loop of the running trainer function."""
    fit, validate, test, predict = evaluation_loops(trainer)
    assert trainer.state.fn is not None
    return {"fit": fit, "validate": validate, "test": test, "predict": predict}[trainer.state.fn.value]


def synchronize_decisions(
    trainer: Trainer,
    agree: Callable[[bool], bool],
    compare: Callable[[str, int | str], None],
    host: dist.ProcessGroup,
    back: ExitStack,
) -> None:
    """Make decisions the same on all ranks that Lightning takes on each: time to validate, loaders. Collective.

    Args:
        trainer: the trainer of the run.
        agree: broadcasts the decision of rank 0, whose clock counts.
        compare: raises on all ranks if they are about to set up different numbers of loaders.
        host: process group of all ranks, for messages on the CPU.
        back: gets callbacks that undo the changes.
    """
    loop: Any = trainer.fit_loop.epoch_loop

    def should_check(fetcher: Any) -> bool:
        return agree(type(loop)._should_check_val_fx(loop, fetcher))

    if trainer._val_check_time_interval is not None:  # type: ignore[attr-defined]
        back.enter_context(replaced(loop, "_should_check_val_fx", should_check))
    val_source = loop.val_loop._data_source  # without loaders, Lightning skips validation
    compare(val_source.name, "some" if val_source.is_defined() else "none")

    def load_together(source: Any, make: Callable[[], Any]) -> Any:
        result = run_or_raise_on_all(make, "make its data loaders", host)
        compare(source.name, len((result if isinstance(result, CombinedLoader) else CombinedLoader(result)).flattened))
        return result  # next, Lightning runs a collective for each loader

    loops: list[Any] = [trainer.fit_loop, *evaluation_loops(trainer)]
    for source in (each._data_source for each in loops):
        back.enter_context(replaced(source, "dataloader", partial(load_together, source, source.dataloader)))


def loaders_left_to_validate(trainer: Trainer) -> list[Any]:
    """Return the loaders of the validation that follows the batch that just ended, else an empty list.

    A run that resumes from a checkpoint saved at this point skips that validation.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    batches, combined = loop.batch_progress.total, loop.val_loop._combined_loader
    ends_now = trainer.training and batches.completed < batches.processed
    by_time = trainer._val_check_time_interval is not None  # type: ignore[attr-defined]
    if not ends_now or by_time or combined is None or not loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
        return []
    return list(combined.flattened)


def combined_of(loop: Any) -> CombinedLoader | None:
    """Return the loaders of a loop; None before it has set up its data."""
    combined: CombinedLoader | None = loop._combined_loader
    return combined


def prefetched_batch(loop: Any) -> Any:
    """Return the batch that Lightning has prefetched, as it does for loaders without a length; None if it has not."""
    prefetched = getattr(loop._data_fetcher, "batches", [])
    return prefetched[0][0] if prefetched else None


def switch_worlds(trainer: Trainer, user_world: DefaultGroup, full_world: DefaultGroup, back: ExitStack) -> None:
    """Run user hooks with `user_world` as the default process group, trainer and strategy code with `full_world`.

    User hooks are those of the module, the data module and callbacks. Lightning enters a context of the profiler around
    each hook and each call of the strategy; this function extends that context. `back` restores the profiler.
    """
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    profile = profiler.profile

    @contextmanager
    def profile_in_world(action: str) -> Iterator[Any]:
        of_user = action.startswith(("[LightningModule]", "[LightningDataModule]", "[Callback]"))
        # contexts are nested: a user hook may call the trainer, which may call another hook
        before, group = dist.group.WORLD, (user_world if of_user else full_world).group
        dist.GroupMember.WORLD = group
        try:
            with profile(action) as profiled:
                yield profiled
        finally:
            if before is not group:  # if they are equal, a hook may have destroyed the process group: leave it
                dist.GroupMember.WORLD = before

    back.enter_context(replaced(profiler, "profile", profile_in_world))


def restore_loader_classes() -> None:
    """Remove Lightning's wrappers of loader classes, which stay behind where a hook that makes loaders raises."""
    kinds: list[type] = [DataLoader, BatchSampler]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for name in ("__init__", "__setattr__", "__delattr__"):
            if (original := f"__old{name}") in vars(kind):
                setattr(kind, name, getattr(kind, original))
                delattr(kind, original)


def restart_loaders(loop: Any, load: bool) -> None:
    """Make new iterators of a fit loop's loaders; `load` first loads their states from the checkpoint."""
    if load:
        loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)
        loop._combined_loader_states_to_load = []
    iter(loop._data_fetcher)


def kept_predictions(loop: Any, dataloader_idx: int) -> tuple[list[Any], list[Any]]:
    """Return a loop's predictions of one loader and the indices of their samples: lists with one item per batch."""
    return loop._predictions[dataloader_idx], loop.epoch_batch_indices[dataloader_idx]


def saved_fit_loop(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the fit loop and its loaders in a checkpoint; empty if there is none."""
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


# ---------------------------------------------------------------- combined loaders


def reads_in_turn(combined: CombinedLoader) -> bool:
    """Return whether loaders are read one after the other, so that each batch comes from one loader."""
    return combined._mode == "sequential"


def as_given(combined: CombinedLoader, items: list[Any]) -> Any:
    """Return one item per loader in the structure (list, dict, ...) in which the user passed the loaders."""
    return tree_unflatten(items, combined._spec)


def current_loaders(combined: CombinedLoader, dataloader_idx: int) -> tuple[list[Any], list[Any] | None]:
    """Return the loaders that a batch comes from, and their iterators.

    The second is None where Lightning, which prefetches, has moved on to the iterator of the next loader.
    """
    iterator: Any = combined._iterator
    if not reads_in_turn(combined):
        return combined.flattened, list(iterator.iterators)
    is_current = iterator._iterator_idx == dataloader_idx
    return combined.flattened[dataloader_idx : dataloader_idx + 1], list(iterator.iterators[:1]) if is_current else None


# ---------------------------------------------------------------- a batch


def any_overrides(hooks: tuple[str, ...], module: LightningModule, callbacks: list[Callback]) -> bool:
    """Return whether the module overrides any of these hooks, or a callback the first of them."""
    base = getattr(Callback, hooks[0])
    attributes = [vars(callback).get(hooks[0], getattr(type(callback), hooks[0])) for callback in callbacks]
    of_callbacks = [hook for hook in attributes if hook is not None]  # Lightning does not call a hook that is None
    of_module = {name: unwrap(getattr(module, name)) for name in hooks}  # `is_overridden` raises for callable objects
    overrides = [getattr(it, "__func__", it) is not getattr(LightningModule, name) for name, it in of_module.items()]
    return any(overrides) or any(hook is not base for hook in of_callbacks)
