"""From gradients to the optimizer's step: scaled, clipped, checked for nan, and stepped by what is stored."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel.collectives.functional import by_kind, within_reach
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
"""What schedulers and users change in the groups of optimizers while they train."""
log = logging.getLogger(__name__)
Policy = Literal["stop", "skip", "continue"]
LOSS = "the loss"
LEAST_SCALE = 1.0
"""At this scale of a loss, or less, it is not the scale that makes gradients overflow; DeepSpeed goes no lower."""


class StoredOptimizers:
    """Knows each optimizer of the trainer before it steps or is saved.

    Args:
        strategy: which knows those that the trainer has now.
        store: makes others step what is stored, or raises.
    """

    def __init__(self, strategy: Strategy, store: Callable[[Sequence[Optimizer]], Sequence[StoredOptimizer]]) -> None:
        self._strategy, self._store = strategy, store
        self._held: dict[int, Any] = {}
        """In such a step, by the `id` of what the module shows, the parameter that ranks have."""
        self._parameters: dict[int, nn.Parameter] | None = None
        #: by the `id` of each optimizer of the trainer
        self.known: dict[int, StoredOptimizer] = {}
        self.look_at_loss = False
        """Whether any of them may decide by what its closure returns."""

    def take(self, steppable: Collection[nn.Parameter] | None = None) -> None:
        """Knows those that are new; those that the trainer has no more are forgotten with the next of them.

        Args:
            steppable: as the run begins, the parameters that they may step; None for any.
        """
        if steppable is not None:
            self._parameters = {id(parameter): parameter for parameter in steppable}
        optimizers = self._strategy.optimizers
        if new := [each for each in optimizers if id(each) not in self.known]:
            known = self.known | {id(stored.optimizer): stored for stored in self._store(new)}
            self.known = {id(each): known[id(each)] for each in optimizers}
            self.look_at_loss = any(stored.looks_at_loss for stored in self.known.values())
            self.reach_wrappers()

    def reach_wrappers(self) -> None:
        """Methods of optimizers act on what is stored by whatever name they are called; Lightning has new wrappers."""
        for stored in self.known.values():
            for wrapper in self._strategy._lightning_optimizers:  # whose classes inherit from the optimizers'
                if wrapper.optimizer is stored.optimizer:
                    stored.reach(wrapper)

    def close(self) -> None:
        """Give all optimizers their own methods back, as the run is over; they may still be saved."""
        for stored in self.known.values():
            stored.close(self._strategy._lightning_optimizers)

    def of(self, optimizer: Any) -> StoredOptimizer:
        """What makes this one step what is stored, or the one that it wraps for Lightning."""
        self.take()
        return self.known[id(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)]

    def in_step(self, module: LightningModule) -> Callable[..., Any]:
        """The module's `training_step` of manual optimization, in which groups hold what the module shows."""
        self.take()
        # read before the step: in it ZeRO 3 puts other tensors in these tables
        tables = [part._parameters for part in module.modules()]
        places: list[tuple[dict[str, Any], str, Any]] = [(table, *each) for table in tables for each in table.items()]

        def run(*args: Any, **kwargs: Any) -> Any:
            # by the `id` of the held parameter, what the module has in its place now
            shown: dict[int, Pair] = {
                id(held): (held, table[name]) for table, name, held in places if table.get(name, held) is not held
            }
            self._show([*shown.values()])
            try:
                return module.training_step(*args, **kwargs)
            finally:
                self._show(())

        return run

    def _show(self, pairs: Sequence[Pair]) -> None:
        self._held = {id(shown): held for held, shown in pairs}
        for stored in self.known.values():
            stored.show(pairs)

    def settings(self) -> list[Any]:
        """The `SCHEDULED` numbers of each group of each optimizer, which must be the same on all ranks."""
        optimizers = self._strategy.optimizers
        return [group.get(name) for each in optimizers for group in each.param_groups for name in SCHEDULED]

    def step(self, optimizer: Optimizer, run: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs the step of an optimizer."""
        if id(optimizer) not in self.known:
            self.take()
        return run(optimizer, *args, **kwargs)

    def reduced(self, step: Step, optimizer: Optimizer, found: Iterable[Tensor]) -> list[Any]:
        """The stored parameters of one that is about to clip or step; each rank has its part of gradients.

        Gradients that a step of manual optimization gave, or changed, are means of all ranks from here on.

        Raises:
            ValueError: it steps a parameter that came while the run went on.
        """
        parameters: list[Any] = list(found)
        if self._held:
            parameters = [self._held.get(id(parameter), parameter) for parameter in parameters]
        if self._parameters is not None and not self._parameters.keys() >= set(map(id, parameters)):
            new = next(parameter for parameter in parameters if id(parameter) not in self._parameters)
            raise ValueError(
                f"{type(optimizer).__name__} steps a parameter of shape {list(new.shape)} that the module did not have "
                "when the run began: ranks divide what it had then, and average the gradients of that alone, so each "
                "would step this one by its own; make it in __init__, configure_model or setup, and freeze it "
                "(requires_grad_(False)) until it is needed"
            )
        if not cast(LightningModule, self._strategy.lightning_module).automatic_optimization:
            step.average_given(parameters)
        # ZeRO: from whole gradients to this rank's rows
        step.shard_gradients(parameters)
        return parameters


def scale_of(plugin: Precision) -> float:
    """The factor by which the plugin will multiply a loss before backward."""
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    return 1.0 if scaler is None else float(scaler.get_scale())


class MeshPrecision:
    """Lets a precision plugin clip by the norm over the mesh, and skip a step everywhere if one rank must.

    The plugin is the user's, or the one that Lightning chose, so it keeps its class and its own behaviour. A gradient
    scaler stays: the plugin keeps its scale.

    Args:
        plugin: of the run.
        divided: the model.
        sharded: whether gradients may be sharded.
        reduced: see `StoredOptimizers.reduced`.
        nonfinite: looks at gradients after hooks and clipping.
        back: gives the plugin its own methods back.
    """

    def __init__(
        self,
        plugin: Precision,
        divided: DividedModel,
        sharded: bool,
        reduced: Callable[[Optimizer, Iterable[Tensor]], list[Any]],
        nonfinite: NonFinite,
        back: ExitStack,
    ) -> None:
        world = divided.mesh.world
        self._plugin, self._reduced, self._nonfinite = plugin, reduced, nonfinite
        self._world, self._holding = world if sharded else None, divided.ranks_holding()
        self._pipelined = divided.tree is not None
        #: makes a context in which parameters of a pipeline are what this rank has of them
        self._local: Callable[[], AbstractContextManager[None]] = divided.local if self._pipelined else nullcontext
        scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
        if scaler is not None:
            # with the settings and the scale of the user's
            mesh_scaler = MeshGradScaler.__new__(MeshGradScaler)
            vars(mesh_scaler).update(vars(scaler), _precision=self, _world=world)
            vars(plugin)["scaler"] = mesh_scaler
        back.enter_context(internals.replaced(plugin, "clip_grad_by_norm", self._clip_by_norm))
        back.enter_context(internals.replaced(plugin, "clip_grad_by_value", self._clip_by_value))
        back.enter_context(internals.replaced(plugin, "_after_closure", self._step))

    def reduced(self, optimizer: Optimizer) -> list[Any]:
        """The parameters that an optimizer is about to step, as ranks have them, with final gradients."""
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
        """The closure has run: hooks and clipping follow, then the optimizer steps."""
        plugin = self._plugin
        with self._local():
            parameters = self.reduced(optimizer)
        type(plugin)._after_closure(plugin, model, optimizer)
        with self._local():
            scales = isinstance(plugin, MixedPrecision) and plugin.scaler is not None
            self._nonfinite.before_step(optimizer, parameters, scale_of(plugin) if scales else None)


class MeshGradScaler(torch.amp.GradScaler):
    """A gradient scaler for which an overflow on any rank is an overflow on all."""

    _precision: MeshPrecision
    _world: dist.ProcessGroup

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        with self._precision._local():
            held, bearers = self._precision.reduced(optimizer), list[Tensor]()
            for gradient in [local_part(each.grad) for each in held if each.grad is not None]:
                # torch unscales `.grad` of parameters, so a tensor that bears the local shard stands for each
                bearers.append(gradient.detach())
                bearers[-1].grad = gradient
            shown: Any = SimpleNamespace(param_groups=[{"params": bearers}])
            found = super()._unscale_grads_(shown, inv_scale, found_inf, allow_fp16)
        # all ranks leave the step out, or none
        overflow = sum((value.to(found_inf.device) for value in found.values()), torch.zeros_like(found_inf))
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self._world)
        return {found_inf.device: overflow}


class NonFinite:
    """Looks at losses and gradients before each step of an optimizer, after what the user's hooks did to gradients.

    So no optimizer steps by what is nan or infinite, as in Megatron-LM and torchtitan; Lightning trains on, and saves
    what comes of it.

    | policy     | a loss or a gradient is not finite on some rank                          |
    |------------|--------------------------------------------------------------------------|
    | "stop"     | FloatingPointError on all ranks, which names step, rank and parameter    |
    | "skip"     | a warning that names them; gradients are dropped, the optimizer moves on |
    | "continue" | nobody looks                                                             |

    A gradient scaler (precision="16-mixed") leaves such steps out by itself, and lowers its scale: nobody looks until
    it scales no more (`LEAST_SCALE`).

    Args:
        policy: one of these.
        module: names parameters.
        divided: whether ranks have different gradients; where all have the same, they decide alike without a message.
        group: all ranks, for small messages of the host.
        world: all ranks, for messages of the device.
    """

    def __init__(
        self, policy: Policy, module: LightningModule, divided: bool, group: dist.ProcessGroup, world: dist.ProcessGroup
    ) -> None:
        self._policy, self._module, self._group, self._world = policy, module, group, world
        self._agrees = group.size() > 1 and (divided or policy == "skip")
        self._losses: Tensor | None = None

    def seen(self, loss: Tensor, scaled: Tensor) -> Tensor:
        """What goes backward for a loss: where it is not finite, no gradient of it will be, whatever its graph makes.

        Args:
            loss: as the step returned it.
            scaled: what a plugin made of it.
        """
        if self._policy == "continue" or not loss.requires_grad:
            return scaled
        # without the graph: only whether it is finite
        value = loss.detach()
        self._losses = value if self._losses is None else self._losses + value
        return scaled * (value - value + 1)  # 1 or nan, without a device having to wait, or a hook to be called

    def before_step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], scale: float | None) -> None:
        """Look at the gradients, reduced and clipped, by which the optimizer is about to step. Collective.

        Args:
            optimizer: that steps.
            parameters: its, as ranks have them.
            scale: by which a scaler multiplied the loss; it will leave the step out, and lower its scale. None: none.

        Raises:
            FloatingPointError: on all ranks; something is not finite, and the policy is to stop.
        """
        losses, self._losses = self._losses, None
        if self._policy == "continue" or (scale is not None and scale > LEAST_SCALE):
            return
        held, values = list[nn.Parameter](), list[Tensor]()
        for parameter in parameters:
            value: Any = parameter.grad
            if value is not None:
                # not `to_local`, which costs ten calls each, in every step, for a history that gradients do not have
                value = value._local_tensor if isinstance(value, DTensor) else value
                held.append(parameter)
                values.append(value.coalesce().values() if value.is_sparse else value)
        fine = torch.zeros(())  # the sum of norms: finite if gradients are, unless a norm is too large for its dtype
        for same in by_kind(values):
            norm = torch.stack(torch._foreach_norm(same)).sum()
            fine = norm + fine.to(norm.device)
        if self._agrees:
            fine = within_reach(fine.isfinite().int(), self._world)
            dist.all_reduce(fine, op=dist.ReduceOp.MIN, group=self._world)
        if bool(fine) if self._agrees else math.isfinite(fine.item()):
            return
        said = gather_objects(self._finding(losses, held, values), self._group)
        if not any(said):  # norms were too large for their dtype, and gradients were not
            return
        causes = [finding for finding in said if finding.startswith(LOSS)] or [finding for finding in said if finding]
        told = "; ".join(f"rank {rank}: {finding}" for rank, finding in enumerate(said) if finding in causes)
        where = f"in step {self._module.trainer.global_step}, {told}"
        if self._policy == "stop":
            raise FloatingPointError(
                f"{where}. The optimizer has not stepped. Trainer(detect_anomaly=True) names the operation that made "
                "it; nonfinite='skip', an argument of the strategy, leaves such steps out, 'continue' trains on"
            )
        if self._group.rank() == 0:
            log.warning("%s; the step is left out, for nonfinite='skip'", where)
        optimizer.zero_grad(set_to_none=True)

    def _finding(self, losses: Tensor | None, held: Sequence[nn.Parameter], values: Sequence[Tensor]) -> str:
        if losses is not None and not losses.isfinite():
            return f"{LOSS} is {losses.item()}"
        bad = [parameter for parameter, value in zip(held, values, strict=True) if not value.isfinite().all()]
        if not bad:
            return ""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._module.named_parameters()}
        first = names.get(bad[0], f"a parameter of shape {list(bad[0].shape)}")
        others = f", the first of {len(bad)}," if len(bad) > 1 else ""
        return f"the gradient of {first}{others} is not finite"
