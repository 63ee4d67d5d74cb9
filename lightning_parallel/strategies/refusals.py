"""Refusals before the first step of what cannot be done rightly: the value, the rule, the remedy."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_parallel.mesh import Axis, ParallelMesh
from lightning_parallel.strategies.build.born_sharded import is_born
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
from lightning_parallel.techniques.gradients.coupled import couples
from lightning_parallel.techniques.technique import Technique
from lightning_parallel.techniques.tools.elsewhere import tree_of
from lightning_parallel.techniques.tools.moved import path_of


def refuse_callbacks(callbacks: list[Callback], parameters_are_sharded: bool) -> None:
    """Raise for a callback that would replace sharded parameters."""
    for callback in callbacks:
        if parameters_are_sharded and isinstance(callback, ModelPruning):
            raise ValueError(
                f"{type(callback).__name__} puts whole parameters and masks in the place of parameters, but this "
                "strategy shards them; use Zero(stage=2) or DataParallel(), which alone keep parameters whole, or set "
                "weights to zero in a hook of your own, such as on_train_batch_end, which finds them whole on every "
                "rank"
            )


def refuse_checkpoints(callbacks: list[Callback], needed: int, group: dist.ProcessGroup) -> None:
    """Raise on all ranks where what callbacks will save would find no folder, or no room on the way there.

    Args:
        callbacks: the trainer's, of which some may save.
        needed: bytes that rank 0 would gather in memory at least: the model's parameters. States of optimizers, of
            unknown size, come on top.
        group: all ranks.
    """
    run_or_raise_on_all(lambda: _require_folders(callbacks) if group.rank() == 0 else None, "save checkpoints", group)
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


def _require_folders(callbacks: list[Callback]) -> None:
    """Raise where no file could be made in a folder, or in the one in which it will be made."""
    for saver in (each for each in callbacks if isinstance(each, (ModelCheckpoint, OnExceptionCheckpoint))):
        if saver.dirpath is None or "://" in str(saver.dirpath):
            continue
        folder = there = Path(saver.dirpath).absolute()
        try:
            there = next(path for path in (folder, *folder.parents) if path.exists())
            with TemporaryFile(dir=there):
                continue
        except OSError as error:
            raise ValueError(
                f"{type(saver).__name__} would save checkpoints in {folder}, and nobody can write to {there}: "
                f"{error.strerror}; pass it another dirpath, or have this one made writable"
            ) from error


def refuse_saving_in_a_step(within: bool, mesh: ParallelMesh) -> None:
    """Raise where a step asks for the whole model, but other ranks are at other places of it, or see parts as wholes.

    An exception that left a step has ended it: what saves then comes on all ranks.
    """
    divided: dict[Axis, str] = {
        "pp": "stages of a pipeline run it one after the other",
        "tp": "its parameters look whole on every rank",
    }
    why = [f"{axis}={mesh.sizes[axis]}: {said}" for axis, said in divided.items() if mesh.sizes[axis] > 1]
    if within and why and sys.exc_info()[0] is None:
        raise ValueError(
            f"a checkpoint is saved in a step ({'; '.join(why)}), but all ranks must gather parameters together, "
            "between steps; call trainer.save_checkpoint in a hook, as on_train_batch_end or on_validation_end, or "
            "let ModelCheckpoint save"
        )


def refuse_logger_in_step(name: str, stages: int) -> None:
    """Raise where the step of a pipeline calls a logger: the last stage ends the step, and loggers write on rank 0."""
    raise ValueError(
        f"{name} is called in a step, but each of the {stages} stages of a pipeline runs a part of the step, for each "
        "microbatch, and loggers write on rank 0 only, which does not have the rest; log numbers by self.log, return "
        "tensors from the step, and call the logger in on_train_batch_end(self, outputs, batch, batch_idx), which "
        "finds them, and weights, of the whole batch and model on every rank"
    )


# ---------------------------------------------------------------- a module


LEFT_AS_THEY_ARE = "or use DataParallel() or Zero(stage=2), which leave modules as they are"


def refuse_module(module: LightningModule, mesh: ParallelMesh, techniques: Sequence[Technique]) -> None:
    """Raise for a module that cannot be divided on this mesh, whatever its plan."""
    _refuse_divided(module, mesh)
    checks = [_tensors_without_shape(module), *(_kinds(module, mesh, each) for each in techniques)]
    for fault in itertools.chain(*checks, _layers(module, mesh), _steps(module, mesh)):
        raise ValueError(fault)


def _refuse_divided(module: LightningModule, mesh: ParallelMesh) -> None:
    """Raise for a module that an earlier run left divided; what this run's `configure_model` built is sharded too."""
    shards = [each for each in module.parameters() if isinstance(each, DTensor)]
    if tree_of(module) is not None or not all(
        is_born(each) and each.device_mesh.get_group() is mesh.world for each in shards
    ):
        raise ValueError(
            f"{type(module).__name__} is divided already: a run before failed, or the host had no room for the whole "
            "model; build it anew, and go on from a checkpoint"
        )


def _tensors_without_shape(module: LightningModule) -> Iterator[str]:
    """Parameters and buffers that get their shape from the first batch."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            yield (
                f"{name} has no shape before the module of torch.nn.Lazy… around it has run; run it once on a batch, "
                "as in __init__ or configure_model, or give its layer the number of features"
            )


def _kinds(module: LightningModule, mesh: ParallelMesh, technique: Technique) -> Iterator[str]:
    """Modules and parameters of classes that a technique, which replaces tensors, cannot replace."""
    if not technique.traits.acts_alone and all(mesh.sizes[axis] == 1 for axis in technique.axes):
        return
    scripted = [name for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted and technique.traits.replaces_tensors:
        yield (
            f"{scripted[0]} is a module of TorchScript, which computes with its own tensors, and {technique} gives "
            "modules others in their place; pass it as it was before torch.jit.script or torch.jit.trace "
            f"(Compile() compiles blocks), {LEFT_AS_THEY_ARE}"
        )
    for name, parameter in module.named_parameters():
        kind = type(parameter).__name__
        own = type(parameter) is not nn.Parameter and not is_born(parameter)
        if technique.traits.replaces_parameters and own:
            yield (
                f"{name} is of the class {kind}, and {technique} puts parts in its place that are no {kind}: code that "
                "asks for it, or that the class brings, would not run; tell parameters apart by attributes "
                f"(parameter.{kind.lower()} = True), which their parts have too, {LEFT_AS_THEY_ARE}"
            )


def _layers(module: LightningModule, mesh: ParallelMesh) -> Iterator[str]:
    """Tables that shorten the rows they read: ranks read other samples, and their copies would part."""
    for name, table in module.named_modules():
        if mesh.data.size() > 1 and isinstance(table, (nn.Embedding, nn.EmbeddingBag)) and table.max_norm is not None:
            yield (
                f"{name} has max_norm={table.max_norm:g}, by which it shortens the rows that are read, but the "
                f"{mesh.data.size()} ranks that share a batch read other rows and would train other weights; shorten "
                "all rows in on_train_batch_start (torch.renorm) and leave max_norm out, or use a layout that does not "
                "divide batches"
            )


def _steps(module: LightningModule, mesh: ParallelMesh) -> Iterator[str]:
    """Steps that read their batches themselves, and in a pipeline those that run their own backward."""
    kind = type(module).__name__
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        if mesh.world_size > 1 and is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True):
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


# ---------------------------------------------------------------- optimizers


def refuse_optimizers(
    optimizers: Sequence[Optimizer], mesh: ParallelMesh, shards: bool, callbacks: Sequence[Callback]
) -> None:
    """Raise for optimizers that cannot step, or save, what ranks hold.

    Args:
        optimizers: the user's.
        mesh: of the run. A stage of a pipeline has the gradients and states of its own parameters only.
        shards: whether ranks hold shards of parameters.
        callbacks: the trainer's, of which some may save.
    """
    stages = mesh.sizes["pp"]
    if stages > 1 and any(isinstance(callback, Checkpoint) for callback in callbacks):
        refuse_own_states(optimizers)
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        lists = {id(group["params"]) for group in optimizer.param_groups}
        for name, inner in vars(optimizer).items() if shards or stages > 1 else ():
            # the inner one would go on stepping what nobody stores, without a word
            if isinstance(inner, Optimizer) and any(id(group["params"]) not in lists for group in inner.param_groups):
                raise ValueError(
                    f"{kind}.{name} is a {type(inner).__name__} with lists of parameters of its own, and ranks hold "
                    f"parts of the parameters, which take their place in the lists of {kind} only; share them, as by "
                    f"self.{name}.param_groups = self.param_groups, or use DataParallelStrategy"
                )
        if stages > 1 and couples(optimizer):
            raise ValueError(
                f"{kind} lets the step of a parameter depend on other parameters or their gradients, as a norm over "
                f"all or one direction for all do (seen in a trial on copies), but each of the {stages} stages of a "
                "pipeline has its own only; clip by gradient_clip_val of the Trainer, whose norm is that of all "
                "stages, with AdamW or another optimizer that steps parameters one by one, or use ZeroStrategy"
            )


def refuse_own_states(optimizers: Sequence[Optimizer]) -> None:
    """Raise for an optimizer of a pipeline that writes its state in a way of its own, which no other rank knows."""
    for kind in (type(each).__name__ for each in optimizers if type(each).state_dict is not Optimizer.state_dict):
        raise ValueError(
            f"{kind}.state_dict writes the state in a way of its own, but for a checkpoint of a pipeline that of "
            f"all stages is put together by parameters; keep it in self.state and leave state_dict to Optimizer "
            f"(an optimizer within {kind} can share it: inner.state = self.state), pass "
            "enable_checkpointing=False to the Trainer, or use ZeroStrategy"
        )


def refuse_combinations(techniques: Sequence[Technique]) -> None:
    """Raise for techniques that cannot be in one strategy; those that claim one axis, `resolve_sizes` refuses."""
    seen: dict[type[Technique], Technique] = {}
    for technique in techniques:
        if not technique.axes and type(technique) in seen:
            raise ValueError(f"{seen[type(technique)]!r} and {technique!r} would both act on every block; keep one")
        seen[type(technique)] = technique
    for splitting, whole in itertools.product(techniques, repeat=2):
        if splitting.traits.splits_backward and whole.traits.keeps_backward_whole is not None:
            raise ValueError(
                f"{splitting!r} computes gradients of inputs and of weights one after the other, but {whole!r} "
                f"{whole.traits.keeps_backward_whole}, so all of it would be computed twice; choose a schedule "
                "such as '1f1b' or 'interleaved_1f1b', or leave the other out"
            )


def refuse_old_parameters(optimizers: Sequence[Optimizer], divided: Any, host: dist.ProcessGroup) -> None:
    """Raise on all ranks for an optimizer made before the module was divided: it steps what is no part of it now."""
    if not divided.in_parts:
        return
    known = set(map(id, divided.known()))
    found = [
        _said_of_old(optimizer, parameter, path_of(parameter))
        for optimizer in optimizers
        for parameter in (each for group in optimizer.param_groups for each in group["params"])
        if id(parameter) not in known
    ]
    for said in gather_objects(found, host):
        if said:
            raise ValueError(said[0])


def has_states(optimizer: Optimizer) -> bool:
    """Whether the optimizer has a state for any parameter, as after its first step."""
    return any(optimizer.state.values())


def _said_of_old(optimizer: Optimizer, parameter: torch.Tensor, name: str | None) -> str:
    kind = type(optimizer).__name__
    if name is not None:
        return (
            f"{kind} was made before ranks divided the module's parameters and has states already, which cannot be "
            f"divided with them ({name}); make {kind} in configure_optimizers, and load its states from a checkpoint "
            "(ckpt_path=)"
        )
    return (
        f"{kind} has a parameter of shape {list(parameter.shape)} that is none of the module's: it is not registered "
        f"in the module, or an earlier run left it in {kind}; make the optimizer in configure_optimizers, of "
        "self.parameters()"
    )
