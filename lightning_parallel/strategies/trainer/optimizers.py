"""The trainer's optimizers, each of which steps what is stored; a hook may put others in their place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies.lightning_package import LightningModule, LightningOptimizer, Strategy
from lightning_parallel.techniques.gradients.stored_optimizer import Pair, StoredOptimizer
from lightning_parallel.techniques.step import Step

T = TypeVar("T")

SCHEDULED = "lr", "momentum", "betas", "weight_decay"
"""What schedulers and users change in the groups of optimizers while they train."""


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
        self._known: dict[int, StoredOptimizer] = {}
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
        for optimizer in optimizers:
            if id(optimizer) not in self._known:
                new = [each for each in optimizers if id(each) not in self._known]
                known = self._known | {id(stored.optimizer): stored for stored in self._store(new)}
                self._known = {id(each): known[id(each)] for each in optimizers}
                self.look_at_loss = any(stored.looks_at_loss for stored in self._known.values())
                self.reach_wrappers()
                return

    def reach_wrappers(self) -> None:
        """Methods of optimizers act on what is stored by whatever name they are called; Lightning has new wrappers."""
        for stored in self._known.values():
            for wrapper in internals.wrapped_optimizers(self._strategy):
                if wrapper.optimizer is stored.optimizer:
                    stored.reach(wrapper)

    def close(self) -> None:
        """Give all optimizers their own methods back, as the run is over; they may still be saved."""
        for stored in self._known.values():
            stored.close(internals.wrapped_optimizers(self._strategy))

    def of(self, optimizer: Any) -> StoredOptimizer:
        """What makes this one step what is stored, or the one that it wraps for Lightning."""
        self.take()
        return self._known[id(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)]

    def in_step(self, module: LightningModule) -> Callable[..., Any]:
        """The module's `training_step` of manual optimization, in which groups hold what the module shows."""
        self.take()
        tables = [part._parameters for part in module.modules()]
        places: list[tuple[dict[str, Any], str, Any]] = [(table, *each) for table in tables for each in table.items()]

        def run(*args: Any, **kwargs: Any) -> Any:
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
        for stored in self._known.values():
            stored.show(pairs)

    def settings(self) -> list[Any]:
        """The `SCHEDULED` numbers of each group of each optimizer, which must be the same on all ranks."""
        optimizers = self._strategy.optimizers
        return [group.get(name) for each in optimizers for group in each.param_groups for name in SCHEDULED]

    def step(self, optimizer: Optimizer, run: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs the step of an optimizer.

        Raises:
            ValueError: it steps a parameter that came while the run went on.
        """
        stored = self._known.get(id(optimizer)) or self.of(optimizer)
        parameters = stored.parameters()
        if self._parameters is not None and not self._parameters.keys() >= set(map(id, parameters)):
            self._refuse(optimizer, parameters)
        return run(optimizer, *args, **kwargs)

    def reduced(self, step: Step, found: Iterable[Tensor]) -> list[Any]:
        """The stored parameters of those that are about to be clipped or stepped; each rank has its part of gradients.

        Gradients that a step of manual optimization gave, or changed, are means of all ranks from here on.
        """
        parameters: list[Any] = list(found)
        if self._held:
            parameters = [self._held.get(id(parameter), parameter) for parameter in parameters]
        if not cast(LightningModule, self._strategy.lightning_module).automatic_optimization:
            step.average_given(parameters)
        step.shard_gradients(parameters)
        return parameters

    def _refuse(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        new = next(parameter for parameter in parameters if id(parameter) not in (self._parameters or ()))
        raise ValueError(
            f"{type(optimizer).__name__} steps a parameter of shape {list(new.shape)} that the module did not have "
            "when the run began: ranks divide what it had then, and average the gradients of that alone, so each "
            "would step this one by its own; make it in __init__, configure_model or setup, and freeze it "
            "(requires_grad_(False)) until it is needed"
        )
