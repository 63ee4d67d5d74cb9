"""From gradients to the optimizer step: gradients are unscaled, clipped and checked for nan; optimizers step shards."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel.collectives.functional import group_by_dtype_and_device, to_group_device
from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies.lightning_package import (
    LightningModule,
    LightningOptimizer,
    MixedPrecision,
    Precision,
    Strategy,
)
from lightning_parallel.strategies.model.divided_model import DividedModel
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.techniques.gradients.clipping import clip_by_norm, clip_by_value
from lightning_parallel.techniques.gradients.stored_optimizer import Pair, StoredOptimizer
from lightning_parallel.techniques.step import Step
from lightning_parallel.techniques.tools.shards import local as local_part
from lightning_parallel.techniques.tools.staged import Staged

T = TypeVar("T")

SCHEDULED = "lr", "momentum", "betas", "weight_decay"
"""Options of optimizer param groups that schedulers and users change during training."""
log = logging.getLogger(__name__)
Policy = Literal["stop", "skip", "continue"]
LOSS = "the loss"
LEAST_SCALE = 1.0
"""At this loss scale or a lower one, scaling does not enlarge gradients: an overflow is real. DeepSpeed stops here."""


class StoredOptimizers:
    """Makes a `StoredOptimizer` for each optimizer of the trainer, also for one that a hook adds, before its first use.

    Args:
        strategy: holds the trainer's present optimizers.
        store: makes a `StoredOptimizer` of each new optimizer, or raises.
    """

    def __init__(self, strategy: Strategy, store: Callable[[Sequence[Optimizer]], Sequence[StoredOptimizer]]) -> None:
        self._strategy, self._store = strategy, store
        self._held: dict[int, Any] = {}
        """In a step of manual optimization: `id` of the full parameter in the module -> the stored parameter."""
        self._parameters: dict[int, nn.Parameter] | None = None
        #: by the `id` of the trainer's optimizer
        self.known: dict[int, StoredOptimizer] = {}
        self.uses_loss = False
        """Whether any optimizer may use the loss that its closure returns."""

    def take(self, steppable: Collection[nn.Parameter] | None = None) -> None:
        """Make a `StoredOptimizer` for each new optimizer of the trainer, and then drop those of removed optimizers.

        Args:
            steppable: given when the run begins: the only parameters that optimizers may step; None for any.
        """
        if steppable is not None:
            self._parameters = {id(parameter): parameter for parameter in steppable}
        optimizers = self._strategy.optimizers
        if new := [optimizer for optimizer in optimizers if id(optimizer) not in self.known]:
            known = self.known | {id(stored.optimizer): stored for stored in self._store(new)}
            self.known = {id(optimizer): known[id(optimizer)] for optimizer in optimizers}
            self.uses_loss = any(stored.uses_loss_of_closure for stored in self.known.values())
            self.reach_wrappers()

    def reach_wrappers(self) -> None:
        """Let Lightning's wrappers, which it makes anew for new optimizers, run the methods that step shards."""
        for stored in self.known.values():
            for wrapper in self._strategy._lightning_optimizers:  # their classes inherit from the optimizers' classes
                if wrapper.optimizer is stored.optimizer:
                    stored.reach(wrapper)

    def close(self) -> None:
        """Restore the original methods of all optimizers after the run; their states may still be saved."""
        for stored in self.known.values():
            stored.close(self._strategy._lightning_optimizers)

    def of(self, optimizer: Any) -> StoredOptimizer:
        """Return the `StoredOptimizer` of an optimizer, or of the optimizer inside a `LightningOptimizer`."""
        self.take()
        return self.known[id(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)]

    def in_step(self, module: LightningModule) -> Callable[..., Any]:
        """Return the module's `training_step`; while it runs, param groups hold the same tensors as the module."""
        self.take()
        # list the parameters before the step, in which ZeRO 3 puts other tensors into these tables
        tables = [submodule._parameters for submodule in module.modules()]
        places: list[tuple[dict[str, Any], str, Any]] = [(table, *item) for table in tables for item in table.items()]

        def run(*args: Any, **kwargs: Any) -> Any:
            # by the `id` of the stored parameter: the parameter, and the tensor that the module has in its place now
            pairs: dict[int, Pair] = {
                id(held): (held, table[name]) for table, name, held in places if table.get(name, held) is not held
            }
            self._show([*pairs.values()])
            try:
                return module.training_step(*args, **kwargs)
            finally:
                self._show(())

        return run

    def _show(self, pairs: Sequence[Pair]) -> None:
        """Put the second tensor of each pair into param groups in place of the first; () restores the groups."""
        self._held = {id(shown): held for held, shown in pairs}
        for stored in self.known.values():
            stored.expose(pairs)

    def settings(self) -> list[Any]:
        """Return the `SCHEDULED` options of all param groups, which must be the same on all ranks."""
        optimizers = self._strategy.optimizers
        return [group.get(name) for optimizer in optimizers for group in optimizer.param_groups for name in SCHEDULED]

    def step(self, optimizer: Optimizer, run: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the step of an optimizer, which a hook may just have made."""
        if id(optimizer) not in self.known:
            self.take()
        return run(optimizer, *args, **kwargs)

    def reduced(self, step: Step, optimizer: Optimizer, found: Iterable[Tensor]) -> list[Any]:
        """Return the stored parameters for an optimizer that is about to clip or step. Collective over all ranks.

        From here on their gradients are averaged over ranks, also those that manual optimization set or changed, and
        each rank has its shard of them.

        Raises:
            ValueError: a parameter was made after the run began.
        """
        parameters: list[Any] = list(found)
        if self._held:
            parameters = [self._held.get(id(parameter), parameter) for parameter in parameters]
        if self._parameters is not None and not self._parameters.keys() >= set(map(id, parameters)):
            new = next(parameter for parameter in parameters if id(parameter) not in self._parameters)
            raise ValueError(
                f"{type(optimizer).__name__} steps a parameter of shape {list(new.shape)} that the module did not have "
                "when the run began. Ranks average only the gradients of parameters from then, so each would step this "
                "one by its own; make it in __init__, configure_model or setup, and freeze it (requires_grad_(False)) "
                "until it is needed"
            )
        if not cast(LightningModule, self._strategy.lightning_module).automatic_optimization:
            step.average_user_gradients(parameters)
        # ZeRO: full gradients -> rows of this rank
        step.shard_gradients(parameters)
        return parameters


def scale_of(plugin: Precision) -> float | None:
    """Return the factor by which the plugin's gradient scaler will multiply the loss; None without a scaler."""
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    return None if scaler is None else float(scaler.get_scale())


class MeshPrecision:
    """Lets a precision plugin clip by the norm over the mesh, and skip a step on all ranks if one rank must skip it.

    The plugin is the user's, or the one that Lightning chose: it keeps its class and its behavior. Its gradient scaler
    is replaced during the run by a `MeshGradScaler` with the same settings and scale.

    Args:
        plugin: the precision plugin of the run.
        divided: the divided model.
        sharded: whether gradients may be sharded.
        reduced: see `StoredOptimizers.reduced`.
        nonfinite: checks gradients after hooks and clipping.
        back: restores the methods of the plugin.
    """

    def __init__(
        self,
        plugin: Precision,
        divided: DividedModel,
        sharded: bool,
        reduced: Callable[[Optimizer, Iterable[Tensor]], list[Any]],
        nonfinite: FiniteCheck,
        back: ExitStack,
    ) -> None:
        world = divided.mesh.world
        self._plugin, self._reduced, self._nonfinite = plugin, reduced, nonfinite
        self._world, self._holding = world if sharded else None, divided.ranks_holding()
        self._pipelined, self._local = divided.tree is not None, divided.local
        scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
        if scaler is not None:
            # with the settings and the scale of the user's scaler
            mesh_scaler = MeshGradScaler.__new__(MeshGradScaler)
            vars(mesh_scaler).update(vars(scaler), _precision=self, _world=world)
            vars(plugin)["scaler"] = mesh_scaler
        back.enter_context(internals.replaced(plugin, "clip_grad_by_norm", self._clip_by_norm))
        back.enter_context(internals.replaced(plugin, "clip_grad_by_value", self._clip_by_value))
        back.enter_context(internals.replaced(plugin, "_after_closure", self._step))

    def reduced(self, optimizer: Optimizer) -> list[Any]:
        """Return the stored parameters of this rank that an optimizer is about to step, with reduced gradients."""
        parameters: list[Any] = []
        for group in optimizer.param_groups:
            parameters += group["params"]
        if self._pipelined:
            parameters = [parameter for parameter in parameters if not isinstance(parameter, Staged)]
        return self._reduced(optimizer, parameters)

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        with self._local():
            clip_by_norm(self.reduced(optimizer), clip_val, self._world, self._holding)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        with self._local():
            clip_by_value(self.reduced(optimizer), clip_val)

    def _step(self, model: Any, optimizer: Any) -> None:
        """Reduce gradients after the closure has run, call hooks and clip, then check gradients for nan and inf."""
        plugin = self._plugin
        with self._local():
            parameters = self.reduced(optimizer)
        type(plugin)._after_closure(plugin, model, optimizer)
        with self._local():
            self._nonfinite.before_step(optimizer, parameters, scale_of(plugin))


class MeshGradScaler(torch.amp.GradScaler):
    """Gradient scaler for which an overflow on any rank is an overflow on all. Unscaling is collective, all ranks."""

    _precision: MeshPrecision
    _world: dist.ProcessGroup

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        with self._precision._local():
            parameters, holders = self._precision.reduced(optimizer), list[Tensor]()
            for gradient in [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]:
                # torch unscales `.grad` of plain tensors: for each parameter a tensor whose `.grad` is the local shard
                holders.append(gradient.detach())
                holders[-1].grad = gradient
            holder: Any = SimpleNamespace(param_groups=[{"params": holders}])
            found_of_device = super()._unscale_grads_(holder, inv_scale, found_inf, allow_fp16)
        # all ranks skip the step, or none
        overflow = sum((value.to(found_inf.device) for value in found_of_device.values()), torch.zeros_like(found_inf))
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self._world)
        return {found_inf.device: overflow}


class FiniteCheck:
    """Checks losses and gradients for nan and inf before each optimizer step, after user hooks and clipping.

    So no optimizer steps with nan or infinite gradients, as in Megatron-LM and torchtitan; Lightning would train on and
    save the resulting weights.

    | policy     | if a loss or a gradient is not finite on any rank                             |
    |------------|-------------------------------------------------------------------------------|
    | "stop"     | FloatingPointError on all ranks, which names step, rank and parameter         |
    | "skip"     | a warning names them; gradients are set to None, so the step changes nothing  |
    | "continue" | no check                                                                      |

    A gradient scaler (precision="16-mixed") skips such steps by itself and lowers its scale: there is no check until
    the scale has fallen to `LEAST_SCALE`.

    Args:
        policy: "stop", "skip" or "continue".
        module: for the names of parameters.
        divided: whether gradients differ between ranks; where they are the same, ranks decide without a message.
        group: process group of all ranks, for small messages on the CPU.
        world: process group of all ranks, for messages on the device.
    """

    def __init__(
        self, policy: Policy, module: LightningModule, divided: bool, group: dist.ProcessGroup, world: dist.ProcessGroup
    ) -> None:
        self._policy, self._module, self._group, self._world = policy, module, group, world
        self._agrees = group.size() > 1 and (divided or policy == "skip")
        self._losses: Tensor | None = None

    def seen(self, loss: Tensor, scaled: Tensor) -> Tensor:
        """Return the loss to differentiate: `scaled`, or nan if the loss is not finite, so that gradients are nan too.

        Args:
            loss: the loss that the step returned.
            scaled: the loss after the precision plugin's `pre_backward`.
        """
        if self._policy == "continue" or not loss.requires_grad:
            return scaled
        # only whether it is finite matters, so losses are summed, without their graphs
        value = loss.detach()
        self._losses = value if self._losses is None else self._losses + value
        return scaled * (value - value + 1)  # 1 or nan: needs no synchronization with the device and no autograd hook

    def before_step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], scale: float | None) -> None:
        """Check the reduced and clipped gradients with which the optimizer is about to step. Collective over all ranks.

        Args:
            optimizer: the optimizer that steps.
            parameters: its stored parameters on this rank.
            scale: the loss scale of a gradient scaler, which skips bad steps itself; None without a scaler.

        Raises:
            FloatingPointError: on all ranks, if a loss or a gradient is not finite and the policy is "stop".
        """
        losses, self._losses = self._losses, None
        if self._policy == "continue" or (scale is not None and scale > LEAST_SCALE):
            return
        held, values = list[nn.Parameter](), list[Tensor]()
        for parameter in parameters:
            value: Any = parameter.grad
            if value is not None:
                # `to_local` would cost ten calls per parameter and step, for an autograd history that gradients lack
                value = value._local_tensor if isinstance(value, DTensor) else value
                held.append(parameter)
                values.append(value.coalesce().values() if value.is_sparse else value)
        fine = torch.zeros(())  # sum of norms: finite if all gradients are, unless a norm overflows its dtype
        for same in group_by_dtype_and_device(values):
            norm = torch.stack(torch._foreach_norm(same)).sum()
            fine = norm + fine.to(norm.device)
        if self._agrees:
            fine = to_group_device(fine.isfinite().int(), self._world)
            dist.all_reduce(fine, op=dist.ReduceOp.MIN, group=self._world)
        if bool(fine) if self._agrees else math.isfinite(fine.item()):
            return
        findings = gather_objects(self._finding(losses, held, values), self._group)
        if not any(findings):  # all gradients are finite: only norms overflowed their dtype
            return
        causes = [text for text in findings if text.startswith(LOSS)] or [text for text in findings if text]
        listed = "; ".join(f"rank {rank}: {finding}" for rank, finding in enumerate(findings) if finding in causes)
        where = f"in step {self._module.trainer.global_step}, {listed}"
        if self._policy == "stop":
            raise FloatingPointError(
                f"{where}. The optimizer has not stepped. Trainer(detect_anomaly=True) names the operation that caused "
                "it; with nonfinite='skip' the strategy skips such steps, with 'continue' it trains on"
            )
        if self._group.rank() == 0:
            log.warning("%s; the step is skipped (nonfinite='skip')", where)
        optimizer.zero_grad(set_to_none=True)

    def _finding(self, losses: Tensor | None, held: Sequence[nn.Parameter], values: Sequence[Tensor]) -> str:
        """Describe the first loss or gradient of this rank that is not finite; "" if all are."""
        if losses is not None and not losses.isfinite():
            return f"{LOSS} is {losses.item()}"
        nonfinite = [parameter for parameter, value in zip(held, values, strict=True) if not value.isfinite().all()]
        if not nonfinite:
            return ""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._module.named_parameters()}
        first = names.get(nonfinite[0], f"a parameter of shape {list(nonfinite[0].shape)}")
        others = f", the first of {len(nonfinite)}," if len(nonfinite) > 1 else ""
        return f"the gradient of {first}{others} is not finite"
