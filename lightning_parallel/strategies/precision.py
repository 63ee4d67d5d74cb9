"""Precision on a mesh: whatever plugin Lightning chose clips and scales over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.strategies.lightning_package import DoublePrecision, MixedPrecision, Precision
from lightning_parallel.strategies.model.nonfinite import NonFinite
from lightning_parallel.techniques.gradients.clipping import clip_by_norm, clip_by_value
from lightning_parallel.techniques.tools.shards import local as local_part
from lightning_parallel.techniques.tools.staged import Staged


def adapt_precision(
    plugin: Precision,
    world: dist.ProcessGroup,
    sharded: bool,
    ranks_holding: Callable[[Tensor], int],
    reduced: Callable[[Iterable[Tensor]], list[Any]],
    nonfinite: NonFinite,
    local: Callable[[], AbstractContextManager[None]],
) -> None:
    """Makes a precision plugin clip by the norm over the mesh, and skip a step everywhere if one rank must.

    Args:
        plugin: the user's, or the one Lightning chose; kept, so that its own behaviour stays.
        world: all ranks.
        sharded: whether gradients may be sharded.
        ranks_holding: how many ranks hold a parameter, or a part of it.
        reduced: see `StoredOptimizers.reduced`.
        nonfinite: looks at gradients after hooks and clipping.
        local: makes a context in which parameters of a pipeline are what this rank has of them.
    """
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    if scaler is not None:
        vars(plugin)["scaler"] = MeshGradScaler.like(scaler, reduced, world, local)

    def by_norm(optimizer: Optimizer, clip_val: float) -> None:
        with local():
            found = reduced(_held(plugin.main_params(optimizer)))
            clip_by_norm(found, clip_val, world if sharded else None, ranks_holding)

    def by_value(optimizer: Optimizer, clip_val: float) -> None:
        with local():
            clip_by_value(reduced(_held(plugin.main_params(optimizer))), clip_val)

    def after_closure(model: Any, optimizer: Any) -> None:
        with local():
            parameters = reduced(_held(_parameters(optimizer)))
        type(plugin)._after_closure(plugin, model, optimizer)
        with local():
            nonfinite.before_step(optimizer, parameters, None if scaler is None else scale_of(plugin))

    vars(plugin).update(clip_grad_by_norm=by_norm, clip_grad_by_value=by_value, _after_closure=after_closure)


def convert_before_loading(plugin: Precision, module: nn.Module) -> None:
    """Makes a module double that will be so, before a checkpoint is read: its values would lose half of their digits.

    Lightning converts modules after that. Of half precision nothing is lost so.
    """
    if isinstance(plugin, DoublePrecision):
        plugin.convert_module(module)


def restore_precision(plugin: Precision) -> None:
    """Takes `adapt_precision` back; a scaler keeps its scale."""
    for name in ("clip_grad_by_norm", "clip_grad_by_value", "_after_closure"):
        vars(plugin).pop(name, None)


class MeshGradScaler(torch.amp.GradScaler):
    """A gradient scaler for which an overflow on any rank is an overflow on all."""

    _reduced: Callable[[Iterable[Tensor]], list[Any]]
    _world: dist.ProcessGroup
    _local: Callable[[], AbstractContextManager[None]]

    @classmethod
    def like(
        cls,
        scaler: torch.amp.GradScaler,
        reduced: Callable[[Iterable[Tensor]], list[Any]],
        world: dist.ProcessGroup,
        local: Callable[[], AbstractContextManager[None]],
    ) -> MeshGradScaler:
        """Make a mesh scaler with the settings and the scale of this one; for the rest see `adapt_precision`."""
        mesh_scaler = cls.__new__(cls)
        vars(mesh_scaler).update(vars(scaler), _reduced=reduced, _world=world, _local=local)
        return mesh_scaler

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        with self._local():
            held = self._reduced(_held(_parameters(optimizer)))
            gradients = [local_part(p.grad) for p in held if p.grad is not None]
            shown: Any = SimpleNamespace(param_groups=[{"params": [_with_gradient(g) for g in gradients]}])
            found = super()._unscale_grads_(shown, inv_scale, found_inf, allow_fp16)
        overflow = sum((value.to(found_inf.device) for value in found.values()), torch.zeros_like(found_inf))
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self._world)
        return {found_inf.device: overflow}


def _held(parameters: Iterable[Any]) -> list[Any]:
    """Parameters without those of other stages; the tree is local."""
    return [parameter for parameter in parameters if not isinstance(parameter, Staged)]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _with_gradient(gradient: Tensor) -> Tensor:
    bearer = gradient.detach()
    bearer.grad = gradient
    return bearer


def scale_of(plugin: Precision) -> float:
    """The factor by which the plugin will multiply a loss before backward."""
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    return 1.0 if scaler is None else float(scaler.get_scale())
