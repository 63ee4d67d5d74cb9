"""What runs read and change of Lightning by private fields. Most of those of loops and loaders are known here.

Written against Lightning 2.6. What changes an object of the user's registers on `back` how that is undone. Loops and
combined loaders are `Any` where their classes are private or differ by loop.
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
    """Inside, an attribute of an object's own has another value."""
    own = vars(owner)
    before = {name: own[name]} if name in own else {}
    own[name] = value
    try:
        yield
    finally:
        own.pop(name, None)
        own.update(before)


# ---------------------------------------------------------------- a trainer


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The trainer's own list: to change it is to change who is called."""
    callbacks: list[Callback] = vars(trainer)["callbacks"]
    return callbacks


def leave_data_alone(trainer: Trainer, preserved: Callable[[], AbstractContextManager[None]], back: ExitStack) -> bool:
    """Keep Lightning from what it does to samplers, to sharded parameters and to random states.

    Args:
        trainer: of the run.
        preserved: makes a context that keeps random states.
        back: gets what undoes it.

    Returns:
        Whether Lightning might have put its own DistributedSampler in the place of the user's sampler.
    """
    connector = trainer._accelerator_connector
    divides_data = bool(connector.use_distributed_sampler)
    back.callback(setattr, connector, "use_distributed_sampler", divides_data)
    connector.use_distributed_sampler = False
    for loop in evaluation_loops(trainer):
        back.callback(setattr, loop, "inference_mode", loop.inference_mode)
        loop.inference_mode = False  # sharded parameters and inference tensors do not mix
    val_loop: Any = trainer.fit_loop.epoch_loop.val_loop
    skip = val_loop.increment_progress_to_evaluation_end

    def skipped() -> None:  # where a fit only counts an evaluation that it leaves out
        with preserved():
            skip()

    back.enter_context(replaced(val_loop, "increment_progress_to_evaluation_end", skipped))
    return divides_data


def find_parameters_by_identity(callbacks: Iterable[Callback], back: ExitStack) -> None:
    """Let finetuning callbacks look for a parameter in an optimizer by its identity.

    Lightning compares the values of each with each instead, which ranks would have to gather.
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
    """The loops that evaluate; that of a fit comes first."""
    return trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop


def running_evaluation(trainer: Trainer) -> Any:
    """The evaluation loop that runs now."""
    fit, validate, test, predict = evaluation_loops(trainer)
    assert trainer.state.fn is not None
    return {"fit": fit, "validate": validate, "test": test, "predict": predict}[trainer.state.fn.value]


def keep_ranks_together(
    trainer: Trainer,
    agree: Callable[[bool], bool],
    compare: Callable[[str, int | str], None],
    host: dist.ProcessGroup,
    back: ExitStack,
) -> None:
    """Let ranks decide together what Lightning lets each decide by its own. Collective over `host`.

    Args:
        trainer: of the run.
        agree: returns what rank 0 decided, by its clock.
        compare: raises on all ranks where they are about to set up different numbers of loaders.
        host: all ranks.
        back: gets what undoes it.
    """
    loop: Any = trainer.fit_loop.epoch_loop

    def should_check(fetcher: Any) -> bool:
        return agree(type(loop)._should_check_val_fx(loop, fetcher))

    if trainer._val_check_time_interval is not None:  # type: ignore[attr-defined]
        back.enter_context(replaced(loop, "_should_check_val_fx", should_check))
    validating = loop.val_loop._data_source  # without loaders, Lightning leaves validation out
    compare(validating.name, "some" if validating.is_defined() else "none")

    def load_together(source: Any, make: Callable[[], Any]) -> Any:
        given = run_or_raise_on_all(make, "make its data loaders", host)
        compare(source.name, len((given if isinstance(given, CombinedLoader) else CombinedLoader(given)).flattened))
        return given  # next, Lightning meets for each loader

    loops: list[Any] = [trainer.fit_loop, *evaluation_loops(trainer)]
    for source in (each._data_source for each in loops):
        back.enter_context(replaced(source, "dataloader", partial(load_together, source, source.dataloader)))


def loaders_left_to_validate(trainer: Trainer) -> list[Any]:
    """The loaders of the validation that follows the batch that ends now; whoever goes on from here leaves it out."""
    loop: Any = trainer.fit_loop.epoch_loop
    batches, combined = loop.batch_progress.total, loop.val_loop._combined_loader
    ends_now = trainer.training and batches.completed < batches.processed
    by_time = trainer._val_check_time_interval is not None  # type: ignore[attr-defined]
    if not ends_now or by_time or combined is None or not loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
        return []
    return list(combined.flattened)


def combined_of(loop: Any) -> CombinedLoader | None:
    """The loaders that a loop reads, once it has set up its data."""
    combined: CombinedLoader | None = loop._combined_loader
    return combined


def fetched_first(loop: Any) -> Any:
    """The batch that Lightning has read ahead, where loaders have no length; None where they have one."""
    fetched = getattr(loop._data_fetcher, "batches", [])
    return fetched[0][0] if fetched else None


def switch_worlds(trainer: Trainer, user_world: DefaultGroup, full_world: DefaultGroup, back: ExitStack) -> None:
    """Run the hooks of module, data module and callbacks in `user_world`, what they call of the trainer in the other.

    Lightning enters a context of the profiler around each of them, which is extended here.
    """
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    profile = profiler.profile

    @contextmanager
    def profile_in_world(action: str) -> Iterator[Any]:
        of_user = action.startswith(("[LightningModule]", "[LightningDataModule]", "[Callback]"))
        # hooks are nested: a hook of the user may call the trainer, and that a hook again
        before, group = dist.group.WORLD, (user_world if of_user else full_world).group
        dist.GroupMember.WORLD = group
        try:
            with profile(action) as profiled:
                yield profiled
        finally:
            if before is not group:  # else a hook may have ended the process group
                dist.GroupMember.WORLD = before

    back.enter_context(replaced(profiler, "profile", profile_in_world))


def take_patches_back() -> None:
    """Torch's loaders are as they were: where a hook that makes them raises, Lightning leaves its wrappers there."""
    kinds: list[type] = [DataLoader, BatchSampler]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for name in ("__init__", "__setattr__", "__delattr__"):
            if (kept := f"__old{name}") in vars(kind):
                setattr(kind, name, getattr(kind, kept))
                delattr(kind, kept)


def restart_loaders(loop: Any, load: bool) -> None:
    """Loaders of a fit loop are iterated over anew, and go on from where a checkpoint says if that is loaded."""
    if load:
        loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)
        loop._combined_loader_states_to_load = []
    iter(loop._data_fetcher)


def kept_predictions(loop: Any, dataloader_idx: int) -> tuple[list[Any], list[Any]]:
    """The predictions that a loop keeps of one loader, and the indices of their samples: lists, one item a batch."""
    return loop._predictions[dataloader_idx], loop.epoch_batch_indices[dataloader_idx]


def saved_fit_loop(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The state of the fit loop and its loaders in a checkpoint."""
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


# ---------------------------------------------------------------- loaders read together


def reads_in_turn(combined: CombinedLoader) -> bool:
    """Whether loaders are read one after the other, and a batch is one loader's."""
    return combined._mode == "sequential"


def as_given(combined: CombinedLoader, items: list[Any]) -> Any:
    """One item for each loader, in the structure in which the user gave the loaders."""
    return tree_unflatten(items, combined._spec)


def reading_of(combined: CombinedLoader, dataloader_idx: int) -> tuple[list[Any], list[Any] | None]:
    """The loaders that a batch comes from, and their iterators.

    Instead of iterators None where Lightning, fetching ahead, is at the next loader already.
    """
    iterator: Any = combined._iterator
    if not reads_in_turn(combined):
        return combined.flattened, list(iterator.iterators)
    reads = iterator._iterator_idx == dataloader_idx
    return combined.flattened[dataloader_idx : dataloader_idx + 1], list(iterator.iterators[:1]) if reads else None


# ---------------------------------------------------------------- a batch


def somebody_overrides(hooks: tuple[str, ...], module: LightningModule, callbacks: list[Callback]) -> bool:
    """Whether the module overrides one of these hooks, or a callback the first."""
    base = getattr(Callback, hooks[0])
    found = [vars(callback).get(hooks[0], getattr(type(callback), hooks[0])) for callback in callbacks]
    theirs = [hook for hook in found if hook is not None]  # which Lightning does not call
    own = {name: unwrap(getattr(module, name)) for name in hooks}  # for callable objects `is_overridden` raises
    overrides = [getattr(hook, "__func__", hook) is not getattr(LightningModule, name) for name, hook in own.items()]
    return any(overrides) or any(hook is not base for hook in theirs)
