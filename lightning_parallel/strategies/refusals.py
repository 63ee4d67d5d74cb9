"""Faults that are refused before the first step because they could not be done rightly: value, rule, remedy.

Each function of faults is a table from top to bottom: a condition, and the message where it holds. Strategies raise the
first of them by `refuse`.
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
from lightning_parallel.strategies.build import is_born
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
from lightning_parallel.techniques.tools.elsewhere import tree_of
from lightning_parallel.techniques.tools.telling import warn

LEFT_AS_THEY_ARE = "or use DataParallel() or Zero(stage=2), which leave modules as they are"
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
GRADIENTS = "read and change gradients in on_before_optimizer_step, where they compute as the whole on every rank"


def refuse(faults: Iterable[str], group: dist.ProcessGroup | None = None) -> None:
    """Raise ValueError for the first fault, if there is any.

    Args:
        faults: in words.
        group: all ranks, where ranks may find different faults: then all raise the first of the first rank that has
            any. Collective.
    """
    found = next(iter(faults), None)
    for said in [found] if group is None else gather_objects(found, group):
        if said is not None:
            raise ValueError(said)


# ---------------------------------------------------------------- techniques and modules


def technique_faults(techniques: Sequence[Technique]) -> Iterator[str]:
    """Techniques that cannot be in one strategy; those that claim one axis, `resolve_sizes` refuses."""
    seen: dict[type[Technique], Technique] = {}
    for technique in techniques:
        if not technique.axes and type(technique) in seen:
            yield f"{seen[type(technique)]!r} and {technique!r} would both act on every block; keep one"
        seen[type(technique)] = technique
    for splitting, whole in itertools.product(techniques, repeat=2):
        if splitting.traits.splits_backward and whole.traits.keeps_backward_whole is not None:
            yield (
                f"{splitting!r} computes gradients of inputs and of weights one after the other, but {whole!r} "
                f"{whole.traits.keeps_backward_whole}, so all of it would be computed twice; choose a schedule "
                "such as '1f1b' or 'interleaved_1f1b', or leave the other out"
            )


def module_faults(module: LightningModule, mesh: ParallelMesh, techniques: Sequence[Technique]) -> Iterator[str]:
    """A module that cannot be divided on this mesh, whatever its plan."""
    shards = [each for each in module.parameters() if isinstance(each, DTensor)]
    # what this run's `configure_model` built is sharded too
    own = all(is_born(each) and each.device_mesh.get_group() is mesh.world for each in shards)
    if tree_of(module) is not None or not own:
        yield (
            f"{type(module).__name__} is divided already: a run before failed, or the host had no room for the whole "
            "model; build it anew, and go on from a checkpoint"
        )
    tensors = (*module.named_parameters(), *module.named_buffers())
    for name in (name for name, tensor in tensors if is_lazy(tensor)):
        yield (
            f"{name} has no shape before the module of torch.nn.Lazy… around it has run; run it once on a batch, "
            "as in __init__ or configure_model, or give its layer the number of features"
        )
    for technique in techniques:
        if technique.traits.acts_alone or any(mesh.sizes[axis] > 1 for axis in technique.axes):
            yield from _faults_of_replacing(module, technique)
    # parts and steps that expect to see a batch as one device reads it, and as a whole
    kind, readers = type(module).__name__, mesh.data.size()
    for name, table in module.named_modules():
        if readers > 1 and isinstance(table, (nn.Embedding, nn.EmbeddingBag)) and table.max_norm is not None:
            yield (
                f"{name} has max_norm={table.max_norm:g}, by which it shortens the rows that are read, but the "
                f"{readers} ranks that share a batch read other rows and would train other weights; shorten "
                "all rows in on_train_batch_start (torch.renorm) and leave max_norm out, or use a layout that does not "
                "divide batches"
            )
    for name in STEPS if mesh.world_size > 1 else ():
        if is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True):
            yield (
                f"{kind}.{name}(dataloader_iter) reads its batches by itself, but {mesh.world_size} "
                "ranks agree on every batch, and on how much it counts, before its step; write "
                f"{name}(self, batch, batch_idx), and let the Trainer read"
            )
    if mesh.sizes["pp"] > 1 and not module.automatic_optimization:
        yield (
            f"{kind} optimizes manually, but a pipeline of {mesh.sizes['pp']} stages decides "
            "itself when backward runs; use automatic optimization, or a layout without a pipeline"
        )


def _faults_of_replacing(module: LightningModule, technique: Technique) -> Iterator[str]:
    """Modules and parameters of classes that a technique, which replaces tensors, cannot replace."""
    scripted = [name for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted and technique.traits.replaces_tensors:
        yield (
            f"{scripted[0]} is a module of TorchScript, which computes with its own tensors, and {technique} gives "
            "modules others in their place; pass it as it was before torch.jit.script or torch.jit.trace "
            f"(Compile() compiles blocks), {LEFT_AS_THEY_ARE}"
        )
    for name, parameter in module.named_parameters() if technique.traits.replaces_parameters else ():
        kind = type(parameter).__name__
        if type(parameter) is not nn.Parameter and not is_born(parameter):
            yield (
                f"{name} is of the class {kind}, and {technique} puts parts in its place that are no {kind}: code that "
                "asks for it, or that the class brings, would not run; tell parameters apart by attributes "
                f"(parameter.{kind.lower()} = True), which their parts have too, {LEFT_AS_THEY_ARE}"
            )


# ---------------------------------------------------------------- callbacks and checkpoints


def callback_faults(callbacks: Iterable[Callback], parameters_are_sharded: bool) -> Iterator[str]:
    """A callback that would replace sharded parameters."""
    for callback in callbacks:
        if parameters_are_sharded and isinstance(callback, ModelPruning):
            yield (
                f"{type(callback).__name__} puts whole parameters and masks in the place of parameters, but this "
                "strategy shards them; use Zero(stage=2) or DataParallel(), which alone keep parameters whole, or set "
                "weights to zero in a hook of your own, such as on_train_batch_end, which finds them whole on every "
                "rank"
            )


def refuse_checkpoints(callbacks: Sequence[Callback], needed: int, group: dist.ProcessGroup) -> None:
    """Raise where what callbacks will save would find no folder, or no room on the way there. Collective.

    Args:
        callbacks: the trainer's, of which some may save.
        needed: bytes that rank 0 would gather in memory at least: the model's parameters. States of optimizers, of
            unknown size, come on top.
        group: all ranks.
    """

    def require_folders() -> None:
        savers = [each for each in callbacks if isinstance(each, (ModelCheckpoint, OnExceptionCheckpoint))]
        for saver in savers if group.rank() == 0 else ():
            if saver.dirpath is None or "://" in str(saver.dirpath):
                continue
            folder = there = Path(saver.dirpath).absolute()
            try:
                # a file can be made there, or in the folder in which that folder will be made
                there = next(path for path in (folder, *folder.parents) if path.exists())
                with TemporaryFile(dir=there):
                    pass
            except OSError as error:
                raise ValueError(
                    f"{type(saver).__name__} would save checkpoints in {folder}, and nobody can write to {there}: "
                    f"{error.strerror}; pass it another dirpath, or have this one made writable"
                ) from None

    run_or_raise_on_all(require_folders, "save checkpoints", group)
    memory = gather_objects(memory_of_host(), group)[0]
    if memory is not None and needed > memory and any(isinstance(callback, Checkpoint) for callback in callbacks):
        raise ValueError(
            f"rank 0 would gather {needed:,} bytes of parameters for a full checkpoint, and its host has {memory:,}; "
            "pass checkpoint='sharded' to the strategy, by which no rank holds the whole, or enable_checkpointing=False"
        )


def memory_of_host() -> int | None:
    """The bytes of memory that this host has in all; None where it does not say."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def faults_of_saving(in_step: bool, mesh: ParallelMesh) -> Iterator[str]:
    """A step that asks for the whole model, where other ranks are at other places of it, or see parts as wholes.

    An exception that left a step has ended it: what saves then comes on all ranks.
    """
    stages, features = mesh.sizes["pp"], mesh.sizes["tp"]
    why = [f"pp={stages}: stages of a pipeline run it one after the other"] if stages > 1 else []
    why += [f"tp={features}: its parameters look whole on every rank"] if features > 1 else []
    if in_step and why and sys.exc_info()[0] is None:
        yield (
            f"a checkpoint is saved in a step ({'; '.join(why)}), but all ranks must gather parameters together, "
            "between steps; call trainer.save_checkpoint in a hook, as on_train_batch_end or on_validation_end, or "
            "let ModelCheckpoint save"
        )


# ---------------------------------------------------------------- optimizers


def optimizer_faults(
    optimizers: Sequence[Optimizer], mesh: ParallelMesh, shards: bool, callbacks: Sequence[Callback]
) -> Iterator[str]:
    """Optimizers that cannot step, or save, what ranks hold.

    Args:
        optimizers: the user's.
        mesh: of the run. A stage of a pipeline has the gradients and states of its own parameters only.
        shards: whether ranks hold shards of parameters.
        callbacks: the trainer's, of which some may save.
    """
    stages = mesh.sizes["pp"]
    if stages > 1 and any(isinstance(callback, Checkpoint) for callback in callbacks):
        yield from faults_of_own_states(optimizers)
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        lists = {id(group["params"]) for group in optimizer.param_groups}
        for name, inner in vars(optimizer).items() if shards or stages > 1 else ():
            # the inner one would go on stepping what nobody stores, without a word
            if isinstance(inner, Optimizer) and any(id(group["params"]) not in lists for group in inner.param_groups):
                yield (
                    f"{kind}.{name} is a {type(inner).__name__} with lists of parameters of its own, and ranks hold "
                    f"parts of the parameters, which take their place in the lists of {kind} only; share them, as by "
                    f"self.{name}.param_groups = self.param_groups, or use DataParallelStrategy"
                )
        if stages > 1 and not steps_each_parameter(optimizer):
            yield (
                f"{kind} is not known to step each parameter by itself, but each of the {stages} stages of a pipeline "
                "has its own parameters and gradients only, and would take norms and directions of these; if it looks "
                f"at one parameter at a time, say so: optimizer.steps_each_parameter = True; else use AdamW, with "
                "gradient_clip_val of the Trainer, whose norm is that of all stages, or ZeroStrategy"
            )
        if shards and isinstance(optimizer, LBFGS):
            yield (
                f"{kind} evaluates its closure again and again within one step, for one direction of all parameters, "
                "but ranks hold shards of them; use DataParallelStrategy, or AdamW or another optimizer of torch"
            )


def faults_of_own_states(optimizers: Iterable[Optimizer]) -> Iterator[str]:
    """An optimizer of a pipeline that writes its state in a way of its own, which no other rank knows."""
    for kind in (type(each).__name__ for each in optimizers if type(each).state_dict is not Optimizer.state_dict):
        yield (
            f"{kind}.state_dict writes the state in a way of its own, but for a checkpoint of a pipeline that of "
            f"all stages is put together by parameters; keep it in self.state and leave state_dict to Optimizer "
            f"(an optimizer within {kind} can share it: inner.state = self.state), pass "
            "enable_checkpointing=False to the Trainer, or use ZeroStrategy"
        )


def faults_of_old_parameters(optimizers: Iterable[Optimizer], known: Iterable[nn.Parameter]) -> Iterator[str]:
    """An optimizer made before the module was divided, which steps what is no part of it now."""
    ids = {id(parameter) for parameter in known}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if id(parameter) not in ids:
                yield (
                    f"{kind} has a parameter of shape {list(parameter.shape)} that is none of the module's: it is not "
                    f"registered in the module, or an earlier run left it in {kind}; make the optimizer in "
                    "configure_optimizers, of self.parameters()"
                )


# ---------------------------------------------------------------- hooks of torch


def hooked(parameters: Mapping[str, Any]) -> dict[str, bool]:
    """The parameters with a user's hook on their gradient, and whether one of it is called with what accumulated."""
    accumulated = {name: _of_users(each._post_accumulate_grad_hooks) for name, each in parameters.items()}
    found = {name: accumulated[name] or _of_users(each._backward_hooks) for name, each in parameters.items()}
    return {name: accumulated[name] for name, any_hook in found.items() if any_hook}


def faults_of_hooks(
    before: Mapping[str, bool], held: Mapping[str, Any], batch: bool, optimizers: Iterable[Optimizer]
) -> Iterator[str]:
    """Hooks on parameters and optimizers that would see parts of gradients, or never be called.

    Args:
        before: what `hooked` found before the model was divided.
        held: the parameters that this rank holds now.
        batch: whether ranks or microbatches compute gradients of parts of the batch.
        optimizers: those that step parts of parameters.
    """
    now = hooked(held)
    for name in held.keys() & (before.keys() | now.keys()):
        if isinstance(held[name], DTensor) or (batch and now.get(name, True)):
            yield f"the hook of torch on {name} would see a part of its gradient, or none; {GRADIENTS}"
    if batch and now:
        warn(
            f"The hook on {min(now)} sees gradients of a part of the batch: right for masks and factors; "
            f"else {GRADIENTS}"
        )
    for optimizer in optimizers:
        if any(_of_users(vars(optimizer).get(f"_optimizer_step_{when}_hooks")) for when in ("pre", "post")):
            yield f"the step hook of {type(optimizer).__name__} would see the shards that each rank steps; {GRADIENTS}"


def _of_users(hooks: Mapping[Any, Any] | None) -> bool:
    # techniques register partials of functions of this library
    plain = [hook.func if isinstance(hook, partial) else hook for hook in (hooks or {}).values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("lightning_parallel.") for hook in plain)
