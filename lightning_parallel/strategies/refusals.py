"""Checks for models, optimizers, callbacks and hooks that would not train correctly. A message names value and remedy.

Each generator function is a list of checks: a condition, and the message to raise if it holds. `refuse` raises the
first message.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.strategies.build import is_build_shard
from lightning_parallel.strategies.lightning_package import (
    Callback,
    Checkpoint,
    LightningModule,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    is_param_in_hook_signature,
)
from lightning_parallel.strategies.ranks.agreement import gather_objects, run_or_raise_on_all
from lightning_parallel.techniques.gradients.elementwise import steps_each_parameter
from lightning_parallel.techniques.technique import Technique
from lightning_parallel.techniques.tools.stage_tree import tree_of
from lightning_parallel.techniques.tools.user_warnings import warn

LEFT_AS_THEY_ARE = "or use DataParallel() or Zero(stage=2), which leave modules as they are"
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
GRADIENTS = "read and change gradients in on_before_optimizer_step, where every rank sees full gradients"


def refuse(faults: Iterable[str], group: dist.ProcessGroup | None = None) -> None:
    """Raise ValueError with the first fault, if there is any.

    Args:
        faults: error messages.
        group: process group of all ranks, needed if ranks may find different faults: all ranks then raise the first
            fault of the lowest rank that has one. Collective over the group.
    """
    first = next(iter(faults), None)
    for message in [first] if group is None else gather_objects(first, group):
        if message is not None:
            raise ValueError(message)


# ---------------------------------------------------------------- techniques and modules


def technique_faults(techniques: Sequence[Technique]) -> Iterator[str]:
    """Refuse techniques that cannot be combined. `resolve_sizes` refuses two that claim the same axis."""
    by_class: dict[type[Technique], Technique] = {}
    for technique in techniques:
        if not technique.axes and type(technique) in by_class:
            yield f"{by_class[type(technique)]!r} and {technique!r} would both act on every block; keep one"
        by_class[type(technique)] = technique
    for splitting, recomputing in itertools.product(techniques, repeat=2):
        if splitting.traits.splits_backward and recomputing.traits.why_backward_is_joint is not None:
            yield (
                f"{splitting!r} computes gradients of inputs and of weights one after the other, but {recomputing!r} "
                f"{recomputing.traits.why_backward_is_joint}, so both would be computed twice; choose a schedule such "
                "as '1f1b' or 'interleaved_1f1b', or drop the latter"
            )


def module_faults(module: LightningModule, mesh: ParallelMesh, techniques: Sequence[Technique]) -> Iterator[str]:
    """Refuse a module that cannot be divided on this mesh, whatever its plan."""
    shards = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
    # shards made in this run's `configure_model` are allowed
    of_this_run = all(is_build_shard(shard) and shard.device_mesh.get_group() is mesh.world for shard in shards)
    if tree_of(module) is not None or not of_this_run:
        yield (
            f"{type(module).__name__} is divided already: an earlier run failed, or the model did not fit on the host; "
            "build it again, and resume from a checkpoint"
        )
    tensors = (*module.named_parameters(), *module.named_buffers())
    for name in (name for name, tensor in tensors if is_lazy(tensor)):
        yield (
            f"{name} has no shape until its torch.nn.Lazy… module has run; run the module once on a batch, as in "
            "__init__ or configure_model, or pass its layer the number of features"
        )
    for technique in techniques:
        if technique.traits.acts_on_one_rank or any(mesh.sizes[axis] > 1 for axis in technique.axes):
            yield from _faults_of_replacing(module, technique)
    # modules and steps that must see the full batch, or read it as a single device would
    kind, readers = type(module).__name__, mesh.data.size()
    for name, table in module.named_modules():
        if readers > 1 and isinstance(table, (nn.Embedding, nn.EmbeddingBag)) and table.max_norm is not None:
            yield (
                f"{name} has max_norm={table.max_norm:g}, which shortens the rows that a forward reads, but the "
                f"{readers} data-parallel ranks read different rows, so their weights would differ; shorten all rows "
                "in on_train_batch_start (torch.renorm) and omit max_norm, or use a layout that does not divide batches"
            )
    for name in STEPS if mesh.world_size > 1 else ():
        if is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True):
            yield (
                f"{kind}.{name}(dataloader_iter) reads batches itself, but {mesh.world_size} ranks must agree on each "
                f"batch and its weight before the step; write {name}(self, batch, batch_idx), and let the Trainer read"
            )
    if mesh.sizes["pp"] > 1 and not module.automatic_optimization:
        yield (
            f"{kind} uses manual optimization, but a pipeline of {mesh.sizes['pp']} stages decides when backward runs; "
            "use automatic optimization, or a layout without a pipeline"
        )


def _faults_of_replacing(module: LightningModule, technique: Technique) -> Iterator[str]:
    """Refuse modules and parameters whose tensors the technique would replace but cannot, because of their class."""
    scripted = [name for name, submodule in module.named_modules() if isinstance(submodule, torch.jit.ScriptModule)]
    if scripted and technique.traits.replaces_tensors:
        yield (
            f"{scripted[0]} is a TorchScript module, whose tensors cannot be replaced, but {technique} replaces them; "
            "pass the module from before torch.jit.script or torch.jit.trace (Compile() compiles blocks), "
            f"{LEFT_AS_THEY_ARE}"
        )
    for name, parameter in module.named_parameters() if technique.traits.replaces_parameters else ():
        kind = type(parameter).__name__
        if type(parameter) is not nn.Parameter and not is_build_shard(parameter):
            yield (
                f"{name} is a {kind}, but {technique} replaces it by shards that are no {kind}: code that checks for "
                "this class, or uses its methods, would not run; mark parameters by attributes "
                f"(parameter.{kind.lower()} = True), which shards have too, {LEFT_AS_THEY_ARE}"
            )


# ---------------------------------------------------------------- callbacks and checkpoints


def callback_faults(callbacks: Iterable[Callback], parameters_are_sharded: bool) -> Iterator[str]:
    """Refuse callbacks that would replace sharded parameters."""
    for callback in callbacks:
        if parameters_are_sharded and isinstance(callback, ModelPruning):
            yield (
                f"{type(callback).__name__} replaces parameters by full tensors and masks, but this strategy shards "
                "them; use only Zero(stage=2) or DataParallel(), which keep parameters full, or set weights to zero in "
                "a hook of your own, such as on_train_batch_end, where every rank sees full parameters"
            )


def refuse_checkpoints(callbacks: Sequence[Callback], needed: int, group: dist.ProcessGroup) -> None:
    """Raise if callbacks could not write checkpoints to their folder, or rank 0 not gather the parameters. Collective.

    Args:
        callbacks: the trainer's callbacks.
        needed: bytes of the parameters that rank 0 gathers for a full checkpoint; optimizer states, of unknown size,
            come on top. 0 for sharded checkpoints.
        group: process group of all ranks, for messages on the CPU.
    """

    def require_folders() -> None:
        savers = [saver for saver in callbacks if isinstance(saver, (ModelCheckpoint, OnExceptionCheckpoint))]
        for saver in savers if group.rank() == 0 else ():
            if saver.dirpath is None or "://" in str(saver.dirpath):
                continue
            folder = existing = Path(saver.dirpath).absolute()
            try:
                # try to write to the folder, or to the nearest existing parent, in which it would be created
                existing = next(path for path in (folder, *folder.parents) if path.exists())
                with TemporaryFile(dir=existing):
                    pass
            except OSError as error:
                raise ValueError(
                    f"{type(saver).__name__} would save checkpoints in {folder}, but {existing} is not writable: "
                    f"{error.strerror}; pass another dirpath, or make this one writable"
                ) from None

    run_or_raise_on_all(require_folders, "save checkpoints", group)
    memory = gather_objects(memory_of_host(), group)[0]
    if memory is not None and needed > memory and any(isinstance(callback, Checkpoint) for callback in callbacks):
        raise ValueError(
            f"rank 0 would gather {needed:,} bytes of parameters for a full checkpoint, but its host has {memory:,}; "
            "pass checkpoint='sharded' to the strategy, so that no rank gathers them, or enable_checkpointing=False"
        )


def memory_of_host(pages: str = "SC_PHYS_PAGES") -> int | None:
    """Return the total memory of this host in bytes, or the free one ("SC_AVPHYS_PAGES"); None if it is unknown."""
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") if pages in os.sysconf_names else None


def faults_of_saving(in_step: bool, mesh: ParallelMesh) -> Iterator[str]:
    """Refuse saving inside a step where ranks run it at different times (pp), or parameters compute as full (tp).

    An exception that left the step has ended it: a save that handles the exception runs on all ranks.
    """
    stages, features = mesh.sizes["pp"], mesh.sizes["tp"]
    why = [f"pp={stages}: stages run it at different times"] if stages > 1 else []
    why += [f"tp={features}: its shards act as full parameters"] if features > 1 else []
    if in_step and why and sys.exc_info()[0] is None:
        yield (
            f"a checkpoint is saved in a step ({'; '.join(why)}), but all ranks must gather parameters together, "
            "between steps; call trainer.save_checkpoint in a hook, as on_train_batch_end or on_validation_end, or let "
            "ModelCheckpoint save"
        )


# ---------------------------------------------------------------- optimizers


def optimizer_faults(
    optimizers: Sequence[Optimizer], mesh: ParallelMesh, shards: bool, callbacks: Sequence[Callback]
) -> Iterator[str]:
    """Refuse optimizers that cannot step, or save the states of, the shards or stages that ranks hold.

    Args:
        optimizers: the user's optimizers.
        mesh: the mesh. A stage of a pipeline has gradients and states for its own parameters only.
        shards: whether ranks hold shards of parameters.
        callbacks: the trainer's callbacks, some of which may save checkpoints.
    """
    stages = mesh.sizes["pp"]
    if stages > 1 and any(isinstance(callback, Checkpoint) for callback in callbacks):
        yield from custom_state_faults(optimizers)
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        lists = {id(group["params"]) for group in optimizer.param_groups}
        for name, inner in vars(optimizer).items() if shards or stages > 1 else ():
            # the inner optimizer would keep stepping the old parameters, which are not stored, without an error
            if isinstance(inner, Optimizer) and any(id(group["params"]) not in lists for group in inner.param_groups):
                yield (
                    f"{kind}.{name} is a {type(inner).__name__} with its own lists of parameters, but parameters are "
                    f"replaced by shards in the lists of {kind} only; share the lists, as in self.{name}.param_groups "
                    "= self.param_groups, or use DataParallelStrategy"
                )
        if stages > 1 and not steps_each_parameter(optimizer):
            yield (
                f"{kind} is not known to step each parameter by itself, but each of the {stages} stages of a pipeline "
                "has only its own parameters and gradients, so norms over all of them would be wrong. If it steps one "
                "parameter at a time, set optimizer.steps_each_parameter = True; else use AdamW with the Trainer's "
                "gradient_clip_val, whose norm is over all stages, or ZeroStrategy"
            )
        if shards and isinstance(optimizer, LBFGS):
            yield (
                f"{kind} evaluates its closure several times in a step to find one direction for all parameters, but "
                "ranks hold shards of them; use DataParallelStrategy, or another torch optimizer, such as AdamW"
            )


def custom_state_faults(optimizers: Iterable[Optimizer]) -> Iterator[str]:
    """Refuse pipelines' optimizers with a custom `state_dict`: states of stages are combined by parameter."""
    for kind in (type(each).__name__ for each in optimizers if type(each).state_dict is not Optimizer.state_dict):
        yield (
            f"{kind} overrides state_dict, but a checkpoint of a pipeline combines the states of all stages by "
            f"parameter; keep states in self.state and do not override state_dict (an optimizer within {kind} can "
            "share them: inner.state = self.state), pass enable_checkpointing=False to the Trainer, or use ZeroStrategy"
        )


def stale_parameter_faults(optimizers: Iterable[Optimizer], known: Iterable[nn.Parameter]) -> Iterator[str]:
    """Refuse optimizers with parameters that the module no longer has, such as those from before the division."""
    ids = {id(parameter) for parameter in known}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if id(parameter) not in ids:
                yield (
                    f"{kind} has a parameter of shape {list(parameter.shape)} that the module does not have: it is not "
                    f"registered there, or {kind} kept it from an earlier run; make the optimizer in "
                    "configure_optimizers, from self.parameters()"
                )


# ---------------------------------------------------------------- hooks of torch


def hooked(parameters: Mapping[str, Any]) -> dict[str, bool]:
    """Map the names of parameters with a user's gradient hook to whether one of its hooks is a post-accumulate hook."""
    accumulated = {name: _of_users(each._post_accumulate_grad_hooks) for name, each in parameters.items()}
    is_hooked = {name: accumulated[name] or _of_users(each._backward_hooks) for name, each in parameters.items()}
    return {name: accumulated[name] for name, any_hook in is_hooked.items() if any_hook}


def faults_of_hooks(
    before: Mapping[str, bool], held: Mapping[str, Any], batch: bool, optimizers: Iterable[Optimizer]
) -> Iterator[str]:
    """Refuse hooks on parameters and optimizers that would get gradient shards or partial gradients, or no call.

    Warns of hooks that get the gradient of a part of the batch.

    Args:
        before: result of `hooked` before the model was divided.
        held: the parameters that this rank holds now.
        batch: whether a backward pass covers only a part of the batch: one rank's, or a microbatch.
        optimizers: those that step shards of parameters.
    """
    now = hooked(held)
    for name in held.keys() & (before.keys() | now.keys()):
        if isinstance(held[name], DTensor) or (batch and now.get(name, True)):
            yield f"the torch hook on {name} would see a part of its gradient, or none; {GRADIENTS}"
    if batch and now:
        warn(
            f"The hook on {min(now)} sees gradients of a part of the batch. That is right for masks and factors; else "
            f"{GRADIENTS}"
        )
    for optimizer in optimizers:
        if any(_of_users(vars(optimizer).get(f"_optimizer_step_{when}_hooks")) for when in ("pre", "post")):
            yield f"the step hook of {type(optimizer).__name__} would see the shards that each rank steps; {GRADIENTS}"


def _of_users(hooks: Mapping[Any, Any] | None) -> bool:
    """Return whether any hook is a function from outside this library."""
    # techniques register partials of functions of this library
    functions = [hook.func if isinstance(hook, partial) else hook for hook in (hooks or {}).values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("lightning_parallel.") for hook in functions)
